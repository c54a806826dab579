"""Conversations: a .jsonl file with {"messages": [{"role": "user", "content": "…"}, …]} a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.data.readers import read_objects
from monoblock.errors import FileError

ANSWERS = "assistant"  # who says what a model is to learn


class Message(NamedTuple):
    role: str
    content: str


class Chat(NamedTuple):
    messages: tuple[Message, ...]

    def told(self, count: int | None = None) -> list[dict[str, str]]:
        """The first so many messages, as templates take them."""
        return [message._asdict() for message in self.messages[:count]]


def read_chats(path: str | Path) -> Iterator[Chat]:
    """Every conversation of a file; each has at least one answer to learn from."""
    for number, row in read_objects(path):
        given = row.get("messages")
        if not isinstance(given, list) or not given:
            raise FileError(
                f'{path}, line {number}: no conversation; write {{"messages": [{{"role": …, "content": …}}]}}'
            )
        chat = Chat(tuple(_message(path, number, one) for one in given))
        if not any(message.role == ANSWERS for message in chat.messages):
            raise FileError(f"{path}, line {number}: nothing is said by the role {ANSWERS!r}, whose answers are learnt")
        yield chat


def _message(path: str | Path, number: int, given: Any) -> Message:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise FileError(f'{path}, line {number}: a message is {{"role": "user", "content": "…"}}, both of them texts')
    return Message(role, content)
