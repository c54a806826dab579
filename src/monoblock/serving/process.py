"""The process that serves: a socket, signals, logs."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from monoblock.errors import InputError
from monoblock.serving.security import BODY_SECONDS, LOCAL_HOSTS, Gate
from monoblock.serving.streams import WRITE_SECONDS

DRAIN_SECONDS = 30.0
LEAST_DRAIN_SECONDS = 1.0  # so that requests on their way are told, too
HEADER_SECONDS = 20.0  # that a client may take for the first line and the headers
MAX_HEADERS = 64 * 1024  # bytes
logger = logging.getLogger("monoblock.serving")


class PatientProtocol(HttpToolsProtocol):
    """HTTP that ends connections on which no request arrives in time, or whose client does not read what it is sent."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that `pause_writing` tells of every byte that is not taken
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._num_bytes = 0  # of headers that are not complete
        self._expect("headers", HEADER_SECONDS)

    def _expect(self, what: str, seconds: float) -> None:
        if what not in self._deadlines:
            self._deadlines[what] = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def _met(self, what: str) -> None:
        if (deadline := self._deadlines.pop(what, None)) is not None:
            deadline.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if "headers" in self._deadlines:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEADERS:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes = 0
        self._expect("headers", HEADER_SECONDS)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._met("headers")
        self._expect("body", BODY_SECONDS + HEADER_SECONDS)  # also of a request that is refused before it is read

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._met("body")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reading", WRITE_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._met("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in list(self._deadlines):
            self._met(what)
        super().connection_lost(exc)


class DrainingServer(uvicorn.Server):
    """A server that answers what has begun before it ends; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self.gate = gate
        self.tasks: set[asyncio.Task[None]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.gate.is_draining:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # what is cut off is no error
            return
        self.gate.is_draining = True
        logger.info("shutting down: %d requests go on, new ones are refused", self.gate.num_requests)
        self.drain_start = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        if self.gate.is_draining:
            least = DRAIN_SECONDS if self.gate.num_requests else LEAST_DRAIN_SECONDS
            self.should_exit |= time.monotonic() - self.drain_start > least
        return await super().on_tick(counter)


def configure(gate: Gate, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        gate,
        host=host,
        port=port,
        http=PatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
    )


def serve(gate: Gate, host: str, port: int) -> None:
    """Serve until a signal; return when what had begun is answered.

    What is there before is never garbage: looking through it takes 280 ms, in which nothing is answered.  The engine
    and the event loop hand the interpreter to each other more often than every 5 ms, Python's default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(0.0005)
    DrainingServer(configure(gate, host, port), gate).run()


def check_address(host: str, port: int, *, has_key_file: bool) -> None:
    """Raise InputError for an address that is in use, or that other machines reach without keys of the user."""
    if host not in LOCAL_HOSTS and not has_key_file:
        raise InputError(f"--host {host} can be reached from other machines; give it keys with --api-key-file FILE")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as problem:
        raise InputError(f"port {port} of {host} cannot be used ({problem.strerror}); give another --port") from None


class JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        about = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        about |= getattr(record, "fields", {})
        if record.exc_info:
            about["error"] = self.formatException(record.exc_info)
        return json.dumps(about, ensure_ascii=False)


def log_to_stderr(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("monoblock.serving", "uvicorn.error"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level if name == "monoblock.serving" else logging.ERROR)
