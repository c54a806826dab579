"""In front of the replicas of a server: requests that begin alike go to one replica, which has that in its pages.

A replica that dies before it has begun to answer costs no answer: another one is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount

from monoblock.serving.app import PROBLEMS, ReplicaLost, answer_problem, describe
from monoblock.serving.replica import Message
from monoblock.serving.security import Receive, Scope, Send
from monoblock.serving.streams import unless_gone

BEGINNING = 64  # characters, about a page of tokens, the least that two prompts can share
ATTEMPTS = 4
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")
Ask = Callable[[Message, bytes, str | None], AsyncGenerator[Message, None]]


def build_relay(ask: Ask) -> Starlette:
    """Return an application that hands each request to a replica.

    ask: a function of a scope of ASGI, a body and what the bodies of similar requests have in common, or None; it asks
        a replica and yields the messages of its answer. If the replica dies, it raises ReplicaLost.
    """

    async def relay(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        await unless_gone(request, _answer(ask, {name: scope[name] for name in SCOPE if name in scope}, body, send))

    return Starlette(routes=[Mount("/", relay)], exception_handlers=dict.fromkeys(PROBLEMS, answer_problem))


async def _answer(ask: Ask, scope: Message, body: bytes, send: Send) -> None:
    key = find_beginning(body)
    for attempt in range(1, ATTEMPTS + 1):
        start: list[Message] = []  # held until more comes, so that another replica can still give the answer
        has_begun = is_complete = False
        try:
            async with aclosing(ask(scope, body, key)) as answer:
                async for message in answer:
                    if message["type"] == "http.response.start":
                        start.append(message)
                        continue
                    for part in (*start, message):
                        await send(part)
                    start, has_begun, is_complete = [], True, not message.get("more_body", False)
            return
        except ReplicaLost as problem:
            if is_complete:
                return
            if has_begun:  # only a stream of events is sent in parts
                event = f"data: {json.dumps(describe(problem)[1])}\n\n"
                await send({"type": "http.response.body", "body": event.encode()})
                return
            if attempt == ATTEMPTS:
                raise


def find_beginning(body: bytes) -> str | None:
    """Return a digest of the model and the beginning of the prompt of a request; None if it has none."""
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("prompt", "messages", "input") if name in fields)
    except (ValueError, TypeError, RecursionError, StopIteration):
        return None
    if isinstance(prompt, list):
        prompt = [one.get("content") if isinstance(one, dict) else one for one in prompt[:BEGINNING]]
    return hashlib.sha256(f"{fields.get('model')} {prompt!s:.{BEGINNING}}".encode("utf-8", "replace")).hexdigest()
