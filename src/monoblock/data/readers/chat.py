"""Read conversations: a .jsonl file with {"messages": [{"role": "user", "content": "…"}, …]} on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monoblock.data.readers.lines import read_jsonl
from monoblock.data.readers.records import Chat, Message
from monoblock.errors import FileError

ASSISTANT_ROLE = "assistant"  # the role whose messages are the targets


def read_chats(path: str | Path) -> Iterator[Chat]:
    """Yield the conversations of a file; each has at least one message of the assistant."""
    for number, row in read_jsonl(path):
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise FileError(
                f'{path}, line {number}: no conversation; write {{"messages": [{{"role": …, "content": …}}]}}'
            )
        chat = Chat(tuple(_parse_message(path, number, message) for message in messages))
        if not any(message.role == ASSISTANT_ROLE for message in chat.messages):
            raise FileError(f"{path}, line {number}: no message has the role {ASSISTANT_ROLE!r}; add one to learn from")
        yield chat


def _parse_message(path: str | Path, number: int, message: Any) -> Message:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise FileError(f'{path}, line {number}: a message must be {{"role": "user", "content": "…"}}, both strings')
    return Message(role, content)
