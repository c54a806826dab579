"""An application that is asked without a socket: in offline batches, and in the processes of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from monoblock.serving.app import create_app
from monoblock.serving.security import Gate
from monoblock.serving.served_model import ServedModel
from monoblock.serving.streams import end_tasks

Message = dict[str, Any]  # of ASGI


class Replica:
    """The application with models that `load` returns; both are made when they are first needed.

    keys, hosts: as of `create_app`.
    """

    def __init__(
        self, load: Callable[[], Sequence[ServedModel]], keys: Iterable[str], hosts: Iterable[str] = ()
    ) -> None:
        self.load, self.keys, self.hosts = load, list(keys), list(hosts)
        self.lock = asyncio.Lock()
        self.models: Sequence[ServedModel] = ()
        self.gate: Gate | None = None
        self.lifespan: AbstractAsyncContextManager[Any] | None = None

    async def start(self) -> int:
        """Begin to answer, in the event loop of the caller; return how many requests keep the engines full."""
        await self._started()
        return max([model.loop.engine.max_rows for model in self.models] + [16]) + 32

    async def _started(self) -> Gate:
        async with self.lock:
            if self.gate is None:
                self.models = self.load()
                gate = create_app(self.models, self.keys, self.hosts)
                self.lifespan = gate.lifespan()
                await self.lifespan.__aenter__()
                self.gate = gate
            return self.gate

    async def stop(self) -> None:
        if self.lifespan is not None:
            await self.lifespan.__aexit__(None, None, None)

    async def ask(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of the answer to a request."""
        return await post(await self._started(), self.keys[0], url, body)

    async def messages(self, scope: Message, body: bytes) -> AsyncGenerator[Message, None]:
        """Yield the answer to a request as messages of ASGI."""
        async with aclosing(messages(await self._started(), scope, body)) as sent:
            async for message in sent:
                yield message


async def messages(app: Any, scope: Message, body: bytes) -> AsyncGenerator[Message, None]:
    """Yield what an application sends; a client that closes the iterator has gone."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message = next(parts, None)
        if message is None:
            await asyncio.Event().wait()  # the client stays
        assert message is not None
        return message

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        await end_tasks(task)


async def post(gate: Gate, key: str, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Ask an application in this process."""
    headers = {"host": "localhost", "authorization": f"Bearer {key}", "content-type": "application/json"}
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode("utf-8", "replace"),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    status, parts = 500, []
    try:
        async with aclosing(messages(gate, scope, json.dumps(body).encode())) as sent:
            async for message in sent:
                status = message.get("status", status)
                parts.append(message.get("body", b""))
        return status, json.loads(b"".join(parts))
    except Exception:  # one request that fails does not end the batch
        return max(status, 400), None
