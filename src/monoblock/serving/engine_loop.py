"""An engine in a thread of its own, which serves the requests of an event loop.

    loop = EngineLoop(engine, max_queue=256)
    async with loop.run(prompt, settings) as outputs:      # leaving the block cancels the request
        async for output in outputs: ...
    vectors = await loop.call(embed, texts)                # between two steps

The thread takes what has been asked for, runs a step and hands its outputs over; it waits only when there is nothing to
do, and the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monoblock.errors import InputError, MonoblockError
from monoblock.inference.engine import MAX_BURST, Engine
from monoblock.inference.scheduler import MAX_STEP_TOKENS, Edit, Prompt, RequestOutput
from monoblock.inference.settings import Settings

T = TypeVar("T")
STEP_SECONDS = 0.2  # that a step with prompts should take at most: others wait for it, also those that want to leave
LEAST_STEP_TOKENS = 32
BURST_SECONDS = 0.04  # that a burst of steps on a GPU should take at most: its tokens are sent when it has ended


class QueueFull(MonoblockError):
    """There are as many requests as the server takes; try again later."""


class Draining(MonoblockError):
    """The server is shutting down and takes no new requests."""


@dataclass(eq=False)
class _Ticket:
    """A request on its way: its outputs arrive in `outputs`, an exception ends them."""

    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request_id: int | None = None  # of the engine, once it has been added


@dataclass
class LoopStatistics:
    """What the thread has done; read by /metrics."""

    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    cancelled: int = 0


class EngineLoop:
    """A thread that steps an engine.

    max_queue: how many requests may wait for the engine; more raise QueueFull.
    """

    def __init__(self, engine: Engine, *, max_queue: int = 256) -> None:
        self.engine = engine
        self.most = engine.max_rows + max_queue  # requests that are taken at a time
        self.statistics = LoopStatistics()
        self.num_open = 0  # requests that have not ended, those of the engine and those before it
        self.is_draining = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, _Ticket] = {}  # of requests in the engine; used by the thread alone
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call it in the event loop that will ask for requests."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its step; what is running ends without an answer."""
        self.is_draining = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- in the event loop ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def run(
        self,
        prompt: Prompt,
        settings: Settings,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        edits: Sequence[Edit] = (),
        capture: Sequence[str] = (),
    ) -> AsyncGenerator[AsyncGenerator[RequestOutput, None], None]:
        """Decode a prompt; the block gets its outputs as they come, and cancels what is left of it when it ends."""
        self.check_room()
        ticket = _Ticket()
        options: dict[str, Any] = {"salt": salt, "adapter": adapter, "edits": edits, "capture": capture}
        self.num_open += 1
        self._commands.put(lambda: self._add(ticket, prompt, settings, options))
        try:
            yield self._outputs(ticket, settings.num_return_sequences)
        finally:
            self.num_open -= 1
            self._commands.put(lambda: self._cancel(ticket))

    def check_room(self, count: int = 1) -> None:
        """Raise QueueFull or Draining if so many further requests are not taken now, InputError if they never are."""
        if count > self.most:
            raise InputError(f"{count} texts are more than this server takes at a time; send at most {self.most}")
        if self.is_draining:
            raise Draining("the server is shutting down; send the request to another one, or later")
        if self.num_open + count > self.most:
            raise QueueFull(f"{self.num_open} requests are running or waiting, at most {self.most} may be; try again")

    async def _outputs(self, ticket: _Ticket, count: int) -> AsyncGenerator[RequestOutput, None]:
        while count:
            output = await ticket.outputs.get()
            if isinstance(output, Exception):
                raise output
            if output.error is not None:
                raise output.error
            count -= output.finish_reason is not None
            yield output

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the thread between two steps, and return its result."""
        self.check_room(0)
        assert self._event_loop is not None
        future = self._event_loop.create_future()

        def command() -> None:
            if future.cancelled():  # nobody waits for it any more
                return
            try:
                result, problem = function(*args), None
            except Exception as error:
                result, problem = None, error
            self._to_event_loop(_resolve, future, result, problem)

        self.num_open += 1
        self._commands.put(command)
        try:
            return await future
        finally:
            self.num_open -= 1

    # -- in the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            command = self._next_command(wait=not self.engine.busy)
            while callable(command):
                command()
                command = self._next_command(wait=False)
            if command is None:
                return
            if self.engine.busy:
                self._step()

    def _next_command(self, *, wait: bool) -> Callable[[], None] | bool | None:
        """Return the next command, None at the end, or False if there is none."""
        try:
            return self._commands.get(wait)
        except queue.Empty:
            return False

    def _add(self, ticket: _Ticket, prompt: Prompt, settings: Settings, options: dict[str, Any]) -> None:
        try:
            ticket.request_id = self.engine.add(prompt.ids, settings, prompt.source, **options)
            self._tickets[ticket.request_id] = ticket
        except Exception as problem:
            self._to_event_loop(ticket.outputs.put_nowait, problem)

    def _cancel(self, ticket: _Ticket) -> None:
        if ticket.request_id is not None and self._tickets.pop(ticket.request_id, None) is not None:
            self.statistics.cancelled += any(
                one.id == ticket.request_id for one in (*self.engine.scheduler.waiting, *self.engine.running)
            )
            self.engine.cancel(ticket.request_id)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            outputs = self.engine.step()
        except Exception as problem:  # of the machine, such as a lack of memory: a step is void, but not repeated
            tickets, self._tickets = self._tickets, {}
            for request_id, ticket in tickets.items():
                self.engine.cancel(request_id)
                self._to_event_loop(ticket.outputs.put_nowait, problem)
            return
        seconds = time.perf_counter() - start
        self.statistics.steps += 1
        self.statistics.step_seconds += seconds
        scheduler = self.engine.scheduler
        if scheduler.num_prompt_tokens:
            tokens = int(scheduler.num_prompt_tokens * STEP_SECONDS / seconds)
            scheduler.step_tokens = min(max(tokens, LEAST_STEP_TOKENS), MAX_STEP_TOKENS)
        elif not BURST_SECONDS / 2 <= seconds <= BURST_SECONDS:
            burst = self.engine.max_burst
            burst = burst // 2 if seconds > BURST_SECONDS else burst * 2
            self.engine.max_burst = min(max(burst, 1), MAX_BURST)
        self.statistics.tokens += sum(len(output.tokens) for output in outputs)
        pairs = [(self._tickets.get(output.request_id), output) for output in outputs]
        self._to_event_loop(_hand_over, [(ticket, output) for ticket, output in pairs if ticket is not None])

    def _to_event_loop(self, function: Callable[..., object], *args: object) -> None:
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *args)


def _hand_over(pairs: Sequence[tuple[_Ticket, RequestOutput]]) -> None:
    for ticket, output in pairs:
        ticket.outputs.put_nowait(output)


def _resolve(future: asyncio.Future[Any], result: object, problem: Exception | None) -> None:
    if future.cancelled():
        return
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(problem)
