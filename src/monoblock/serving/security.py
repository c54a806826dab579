"""Access control and limits: keys, hosts, origins, sizes and times.  What is not allowed is denied."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from monoblock.errors import FileError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/ready")  # without a key; a test compares them with the router
OPEN_FOLDERS = ("/static/",)
MAX_BODY = 4 << 20  # bytes
BODY_SECONDS = 30.0  # until a body has arrived
RETRY_SECONDS = "1"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def read_keys(path: Path) -> list[str]:
    """Return the keys of a file, one on each line."""
    keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys or min(map(len, keys)) < 16:
        raise FileError(f"{path} has no key, or one of fewer than 16 characters; write one long random key per line")
    return keys


class Gate:
    """Let a request through to the application, or answer it with an error.

    keys: the keys of clients; each request gives one as `Authorization: Bearer KEY`.
    hosts: the names under which this server is called; a page of another name must not reach it (DNS rebinding).
    """

    def __init__(self, app: Any, keys: Iterable[str], hosts: Iterable[str] = (), max_body: int = MAX_BODY) -> None:
        self.app, self.max_body = app, max_body
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        assert self.digests, "a server has at least one key"
        self.hosts = {*LOCAL_HOSTS, *(host.lower() for host in hosts)}
        self.is_draining = False
        self.num_requests = self.num_asking = 0  # that have not been answered to the end, and those to models
        self.turn = asyncio.Lock()
        self.most = math.inf  # requests to models at a time; of further ones, not even the body is read
        self.report: Callable[[str, str, int, float], None] = lambda method, path, status, seconds: None

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Run the application in a block, without a server."""
        context: AbstractAsyncContextManager[Any] = self.app.router.lifespan_context(self.app)
        return context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        start, status = time.perf_counter(), 499

        async def note_status(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        asks_model = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        self.num_requests += 1
        try:
            refusal = self._refusal(scope["path"], headers, asks_model)
            if refusal is not None:
                await answer_error(note_status, *refusal)
                return
            digest = self._matching_key(headers)
            scope["state"] = {**scope.get("state", {}), "salt": None if digest is None else digest.hex()[:16]}
            self.num_asking += asks_model
            try:
                async with self.turn:  # requests begin one by one, so that one that is refused does not wait for many
                    await asyncio.sleep(0)
                await self.app(scope, _Limited(receive, self.max_body), note_status)
            finally:
                self.num_asking -= asks_model
        finally:
            self.num_requests -= 1
            self.report(scope["method"], scope["path"], status, time.perf_counter() - start)

    def _refusal(self, path: str, headers: dict[str, str], asks_model: bool) -> tuple[int, str, str, str | None] | None:
        """Return status, message, type and code of the error for a request that may not pass."""
        host = _name(headers.get("host", ""))
        if host not in self.hosts:
            return 403, f"this server is not called {host!r:.80}; start it with --allow-host", "permission_error", None
        origin = headers.get("origin")
        if origin is not None and _name(origin.partition("://")[2]) not in self.hosts:
            return 403, "pages of other origins may not ask this server", "permission_error", None
        if not is_open(path) and self._matching_key(headers) is None:
            said = "the API key is wrong" if "authorization" in headers else "there is no API key"
            message = f"{said}; send the header Authorization: Bearer KEY"
            return 401, message, "authentication_error", "invalid_api_key"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_body:
            return 413, f"the request is larger than {self.max_body:,} bytes", "invalid_request_error", "too_large"
        if self.is_draining and not is_open(path):
            return 503, "the server is shutting down; try another one, or later", "server_error", "shutting_down"
        if asks_model and self.num_asking >= self.most:
            return 429, "as many requests are running and waiting as fit; try again", "rate_limit_error", "queue_full"
        return None

    def _matching_key(self, headers: dict[str, str]) -> bytes | None:
        """Return the digest of the key that a request gives, if it is one of ours."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        found = [digest for digest in self.digests if hmac.compare_digest(digest, given)]
        return found[0] if found and scheme.lower() == "bearer" else None


def is_open(path: str) -> bool:
    """Return whether a path may be asked without a key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


class TooLarge(Exception):
    """A body with more bytes than the server reads."""


class TooSlow(Exception):
    """A body that did not arrive in time."""


class _Limited:
    """The messages of a client, whose body is limited in size and in time."""

    def __init__(self, receive: Receive, max_body: int) -> None:
        self.receive, self.left = receive, max_body
        self.deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self.is_complete = False

    async def __call__(self) -> MutableMapping[str, Any]:
        if self.is_complete:
            return await self.receive()  # until the client goes
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError:
            raise TooSlow from None
        self.left -= len(message.get("body", b""))
        if self.left < 0:
            raise TooLarge
        self.is_complete = not message.get("more_body", False)
        return message


def _name(host: str) -> str:
    """Return the name in a Host header or in the address of an origin, without its port."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower() if parts.netloc == host and parts.username is None else ""
    except ValueError:
        return ""


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def retry_header(status: int) -> dict[str, str]:
    """Return the header that tells a client when to try again, if it may."""
    return {"retry-after": RETRY_SECONDS} if status in (429, 503) else {}


async def answer_error(send: Send, status: int, message: str, kind: str, code: str | None = None) -> None:
    body = json.dumps(error_body(message, kind, code)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **retry_header(status)}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
