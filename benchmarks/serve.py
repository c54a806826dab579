"""A server of OpenAI's API under load: requests arrive at random, and every token is timed as its client gets it.

    python benchmarks/serve.py runs/demo-1 --requests 200 --rate 4 --write
    python benchmarks/serve.py runs/demo-1 --server "transformers serve {model} --port {port} --continuous-batching"
    python benchmarks/serve.py --base-url http://localhost:8001/v1 --key KEY --model NAME    # one that runs already

Arrivals are a Poisson process; prompts are words of about one token, and their number and the length of each answer
come from a seeded table.  The columns are those of `vllm bench serve`: TTFT, the time to the first token;
TPOT, the mean time per further token of a request; ITL, the time between two events of a stream.  Goodput counts the
requests whose first token came within a second and whose slowest event within 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from _report import source, write_section

RESULTS = Path(__file__).with_name("results") / "serve.md"
OURS = f"{shlex.quote(sys.executable)} -m monoblock serve {{model}} --port {{port}} --api-key-file {{keys}}"
WORDS = ("time", "year", "way", "day", "man", "thing", "life", "world", "school", "state", "family", "group", "country")
TTFT_GOAL, ITL_GOAL = 1.0, 0.05  # seconds, of a good request


class Timed(NamedTuple):
    """One answer: when it was asked for, when each event came, and how many tokens it has."""

    start: float
    events: list[float]
    tokens: int

    @property
    def first(self) -> float:
        return self.events[0] - self.start

    @property
    def per_token(self) -> float:
        return (self.events[-1] - self.events[0]) / max(1, self.tokens - 1)


async def ask(client: httpx.AsyncClient, body: dict[str, object], start: float) -> Timed | str:
    """Read the stream of one answer; return its times, or the error."""
    events, tokens = [], 0
    try:
        async with client.stream("POST", "/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                elif event.get("choices"):
                    events.append(time.perf_counter())
    except httpx.HTTPError as problem:
        return repr(problem)
    return Timed(start, events, tokens or len(events)) if events else "no events"


async def load(args: argparse.Namespace, base_url: str, key: str) -> tuple[list[Timed | str], float]:
    """Send all requests at their times; return the answers and the seconds from the first to the last."""
    random = np.random.default_rng(args.seed)
    lengths = random.integers(args.least, args.most + 1, size=(args.requests, 2))
    waits = random.exponential(1 / args.rate, args.requests) if args.rate else np.zeros(args.requests)
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, limits=limits) as client:
        names = (await client.get("/models")).json()["data"]
        model = args.model or names[0]["id"]

        async def one(number: int) -> Timed | str:
            num_prompt, num_new = map(int, lengths[number])
            text = random_text(args, number, num_prompt)
            body = {"model": model, "prompt": text, "max_tokens": num_new, "temperature": 0, "stream": True}
            return await ask(client, {**body, "stream_options": {"include_usage": True}}, time.perf_counter())

        begin = time.perf_counter()
        tasks = []
        for number in range(args.requests):
            await asyncio.sleep(waits[number])
            tasks.append(asyncio.create_task(one(number)))
        answers = await asyncio.gather(*tasks)
        return list(answers), time.perf_counter() - begin


def random_text(args: argparse.Namespace, number: int, length: int) -> str:
    """Return a prompt; with --shared, the first half is the same in half of the requests."""
    own = np.random.default_rng([args.seed, number]).choice(WORDS, length)
    if args.shared and number % 2:
        own[: length // 2] = np.random.default_rng(args.seed).choice(WORDS, args.most)[: length // 2]
    return " ".join(own)


@contextlib.contextmanager
def running_server(command: str, model: str) -> Iterator[tuple[str, str]]:
    """Run a server on a free port until the block ends; yield its address and key."""
    key = "a-key-for-the-benchmark"
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        keys = Path(folder) / "keys"
        keys.write_text(key)
        words = [word.format(model=model, port=port, keys=keys) for word in shlex.split(command)]
        started, address = time.perf_counter(), f"http://127.0.0.1:{port}/v1"
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{address}/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"error: {shlex.join(words)} ended with code {process.returncode}")
                time.sleep(0.05)
            print(f"ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
            yield address, key
        finally:
            process.terminate()
            process.wait()


def format_report(answers: list[Timed | str], seconds: float, args: argparse.Namespace) -> str:
    good = [one for one in answers if isinstance(one, Timed)]
    if not good:
        raise SystemExit(f"error: no request was answered; the first said {answers[0]}")
    between = [np.diff(one.events) for one in good]
    rows = {
        "TTFT (ms)": [one.first for one in good],
        "TPOT (ms)": [one.per_token for one in good],
        "ITL (ms)": np.concatenate(between),
    }
    kept = sum(
        one.first <= TTFT_GOAL and gaps.max(initial=0) <= ITL_GOAL for one, gaps in zip(good, between, strict=True)
    )
    tokens = sum(one.tokens for one in good)
    failed = [one for one in answers if isinstance(one, str)]
    lines = [
        f"{args.name or Path(args.folder or args.base_url).name}, {args.requests} requests, rate {args.rate:g}",
        "",
        source(),
        "",
        f"{len(good)} of {len(answers)} requests answered in {seconds:.1f} s: {len(good) / seconds:.2f} requests/s, "
        f"{tokens / seconds:.0f} output tokens/s, goodput {kept / seconds:.2f} requests/s",
        *(f"- {problem}" for problem in dict.fromkeys(failed)),
        "",
        "| | mean | median | p99 |",
        "|---|---|---|---|",
    ]
    for name, values in rows.items():
        ms = 1e3 * np.asarray(values)
        lines.append(f"| {name} | {ms.mean():.2f} | {np.median(ms):.2f} | {np.percentile(ms, 99):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="the model folder to serve")
    parser.add_argument("--base-url", help="a server that runs already, such as http://localhost:8001/v1")
    parser.add_argument("--key", default="none", help="its key")
    parser.add_argument("--model", help="the name of its model; by default the first")
    parser.add_argument("--name", help="the heading of the table")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second; 0: all at once")
    parser.add_argument("--least", type=int, default=16, help="the fewest tokens of a prompt and of an answer")
    parser.add_argument("--most", type=int, default=128, help="the most")
    parser.add_argument("--shared", action="store_true", help="half of the prompts begin alike")
    parser.add_argument("--server", default=OURS, help="the command of a server; default: %(default)s")
    parser.add_argument("--exact", action="store_true", help="serve in exact mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="serve a toy model")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.smoke:
            args.folder, args.requests, args.rate, args.least, args.most = _toy(stack), 6, 0, 4, 9
        if args.base_url is None:
            if args.folder is None:
                parser.error("give a model folder, or the address of a server with --base-url")
            command = args.server + " --exact" * args.exact
            address, key = stack.enter_context(running_server(command, args.folder))
        else:
            address, key = args.base_url, args.key
        report = format_report(*asyncio.run(load(args, address, key)), args)
    print(report)
    if args.write:
        write_section(RESULTS, "A server under load", report)


def _toy(stack: contextlib.ExitStack) -> str:
    """Write a small model with random weights; return its folder."""
    import torch

    import monoblock as mb

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "toy"
    tokenizer = mb.Tokenizer.train("byte", [], vocab_size=300)
    torch.manual_seed(0)
    mb.Transformer(mb.gpt(vocab=tokenizer.vocab_size, width=32, depth=2, heads=2, context=64)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
