"""A small model behind the application, asked in this process or over a socket."""

import asyncio
import contextlib
import json
import threading

import torch

import monoblock as mb
from monoblock.runs.pipeline import Pipeline
from monoblock.serving.app import create_app
from monoblock.serving.process import DrainingServer, configure
from monoblock.serving.replica import post
from monoblock.serving.served_model import ServedModel

KEY = "a-key-for-the-tests"
TEXTS = ['In the beginning God created the heaven and the earth. yes no true {}[]",:0123456789'] * 20
TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def tiny_pipeline(*, chat=True, context=96):
    """Return a pipeline of a decoder with random weights."""
    tokenizer = mb.Tokenizer.train("bpe", TEXTS, vocab_size=331)
    tokenizer.chat_template = TEMPLATE if chat else None
    torch.manual_seed(0)
    config = mb.gpt(vocab=tokenizer.vocab_size, width=28, depth=2, heads=2, context=context)
    return Pipeline(mb.Transformer(config).eval(), tokenizer)


def tiny_app(**options):
    return create_app([ServedModel("tiny", tiny_pipeline(), **options)], [KEY])


def ask(gate, *requests):
    """Ask an application in this process, all requests at once; return (status, body) for each."""

    async def main():
        async with gate.lifespan():
            return await asyncio.gather(*(post(gate, KEY, path, {"model": "tiny", **body}) for path, body in requests))

    return asyncio.run(main())


@contextlib.contextmanager
def running_server(gate):
    """Run an application on a free port in a thread; yield the server and its address."""
    server = DrainingServer(configure(gate, "127.0.0.1", 0), gate)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def events(text):
    """Return the data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
