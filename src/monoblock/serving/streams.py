"""Responses cancelled when the client disconnects: streams of server-sent events, and plain answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
SHORT_BODY = 4096  # bytes of a request whose prompts are encoded in the event loop
WRITE_SECONDS = 20.0  # that a client may leave an event unread
GONE = Response(status_code=499)  # nobody reads it


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """Return the result of `work`, which is cancelled if the client goes."""
    task, watch = asyncio.create_task(work), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else GONE
    finally:
        await end_tasks(task, watch)


async def prepare(request: Request, work: Callable[[], T], *, is_quick: bool) -> T:
    """Return the result of `work`, from another thread unless it is quick and the request is short."""
    length = int(request.headers.get("content-length", SHORT_BODY + 1))
    return work() if is_quick and length <= SHORT_BODY else await asyncio.to_thread(work)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that are not done, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def begin(events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first event, so that an error before it still has a status of its own; return all of them."""
    first = await anext(events, None)

    async def all_events() -> AsyncGenerator[T, None]:
        async with aclosing(events):
            if first is not None:
                yield first
            async for event in events:
                yield event

    return all_events()


class EventStream(Response):
    """A stream of server-sent events.

    events: the events, each a dictionary, or a pair of its name and a dictionary.
    describe: what an exception between two events is as an event.
    done: whether the stream ends with [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any, None], describe: Any, *, done: bool = True) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.describe, self.done = events, describe, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write, watch = asyncio.create_task(self._write(send)), asyncio.create_task(gone(receive))
        try:
            await asyncio.wait((write, watch), return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        finally:
            await end_tasks(write, watch)
            await self.events.aclose()

    async def _write(self, send: Send) -> None:
        await _in_time(send({"type": "http.response.start", "status": 200, "headers": self.raw_headers}))
        try:
            async for event in self.events:
                await self._send(send, event)
        except (TimeoutError, asyncio.CancelledError):
            raise
        except Exception as problem:
            await self._send(send, self.describe(problem))
        if self.done:
            await _in_time(send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}))
        await _in_time(send({"type": "http.response.body", "body": b""}))

    async def _send(self, send: Send, event: Any) -> None:
        name, data = event if isinstance(event, tuple) else (None, event)
        text = f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
        if name is not None:
            text = f"event: {name}\n{text}"
        await _in_time(send({"type": "http.response.body", "body": text.encode(), "more_body": True}))


async def _in_time(sending: Awaitable[None]) -> None:
    """Wait until a client has taken what it is sent; TimeoutError closes the connection of one that does not."""
    async with asyncio.timeout(WRITE_SECONDS):
        await sending
