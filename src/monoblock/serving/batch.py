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
from typing import IO, Any, Protocol

from monoblock.errors import FileError

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


class Answerer(Protocol):
    """What answers requests: a `Replica`, or those of a cluster."""

    async def start(self) -> int:
        """Return how many requests may be asked at a time."""

    async def stop(self) -> None: ...

    async def ask(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of an answer."""


async def answer_all(
    answerer: Answerer, requests: Iterator[dict[str, Any]], out: IO[bytes], progress: Callable[[int], None]
) -> tuple[int, int]:
    """Answer requests; return how many were answered, and how many of these failed."""
    counts = [0, 0]
    iterator = iter(requests)

    async def work() -> None:
        for request in iterator:
            status = 429
            while status in (429, 503):  # there is no room for all its prompts yet
                status, body = await answerer.ask(request["url"], request["body"])
                await asyncio.sleep(0.1 * (status != 200))
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
            result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"], "response": response}
            out.write(json.dumps({**result, "error": None}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
            counts[0] += 1
            counts[1] += status != 200
            progress(1)

    at_once = await answerer.start()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    finally:
        await answerer.stop()
    return counts[0], counts[1]
