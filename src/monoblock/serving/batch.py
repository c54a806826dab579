"""Offline batches in OpenAI's format: a line of JSON a request, a line a result, in any order.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "In the"}}
    {"id": …, "custom_id": "a", "response": {"status_code": 200, "body": {…}}, "error": null}

The requests go through the same application as those of a server, so many at a time that the engine is full.  Each
result is written whole and at once: what is there when a batch begins again is not asked twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from monoblock.errors import FileError
from monoblock.serving.security import Gate

MAX_LINE = 8 << 20  # bytes


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; a line that is none, or an id that comes twice, raises FileError."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if not line.strip():
                continue
            if len(line) > MAX_LINE:
                raise FileError(f"{path}, line {number}, is longer than {MAX_LINE >> 20} MB; send smaller requests")
            try:
                request = json.loads(line)
                name, url, body = request["custom_id"], request["url"], request["body"]
                is_request = isinstance(name, str) and isinstance(url, str) and isinstance(body, dict)
            except (ValueError, KeyError, TypeError, RecursionError):
                is_request = False
            if not is_request or request.get("method", "POST") != "POST":
                raise FileError(
                    f"{path}, line {number}, is not a request; "
                    'write {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}'
                )
            if name in seen:
                raise FileError(f"{path}, line {number}: the custom_id {name!r:.60} comes twice; give each its own")
            seen.add(name)
            yield {"custom_id": name, "url": url, "body": body | ({"stream": False} if "stream" in body else {})}


def read_finished(path: Path) -> dict[str, bool]:
    """Return the ids with a result in a file, and whether each failed; a line that a kill has cut off is removed."""
    if not path.exists():
        return {}
    finished, end = dict[str, bool](), 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                result = json.loads(line)
                finished[str(result["custom_id"])] = result["response"]["status_code"] != 200
            except (ValueError, KeyError, TypeError):
                raise FileError(f"{path} has a line that is no result; give another file as --out") from None
            end += len(line)
        file.truncate(end)
    return finished


async def answer_all(
    gate: Gate,
    key: str,
    requests: Iterator[dict[str, Any]],
    out: IO[bytes],
    *,
    at_once: int,
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Answer requests, `at_once` at a time; return how many were answered, and how many of these failed."""
    counts = [0, 0]
    iterator = iter(requests)

    async def work() -> None:
        for request in iterator:
            status = 429
            while status in (429, 503):  # there is no room for all its prompts yet
                status, body = await post(gate, key, request["url"], request["body"])
                await asyncio.sleep(0.1 * (status != 200))
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
            result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"], "response": response}
            out.write(json.dumps({**result, "error": None}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
            counts[0] += 1
            counts[1] += status != 200
            progress(1)

    async with gate.lifespan(), asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return counts[0], counts[1]


async def post(gate: Gate, key: str, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Ask an application in this process."""
    raw = json.dumps(body).encode()
    headers = {"host": "localhost", "authorization": f"Bearer {key}", "content-type": "application/json"}
    scope: dict[str, Any] = {
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
    messages = iter([{"type": "http.request", "body": raw, "more_body": False}])
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client stays
        assert message is not None
        return message

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    try:
        await gate(scope, receive, send)
        return status, json.loads(b"".join(parts))
    except Exception:  # one request that fails does not end the batch
        return max(status, 400), None
