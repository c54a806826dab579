"""Read conversations: a .jsonl file with {"messages": [{"role": "user", "content": "…"}, …]} on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monoblock.data.readers.lines import read_jsonl
from monoblock.data.readers.records import Chat, Message
from monoblock.errors import FileError

ASSISTANT_ROLE = "assistant"  # the role of the messages that a model learns to write


def read_chats(path: str | Path) -> Iterator[Chat]:
    """Yield the conversations of a file; raise FileError if one has no message of the role "assistant"."""
    for number, row in read_jsonl(path):
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise FileError(
                f'{path}, line {number}: no conversation, because "messages" is missing, empty or not a list; '
                f'write {{"messages": [{{"role": "user", "content": "…"}}, …]}}'
            )
        chat = Chat(tuple(_parse_message(path, number, message) for message in messages))
        if not any(message.role == ASSISTANT_ROLE for message in chat.messages):
            raise FileError(
                f"{path}, line {number}: no message has the role {ASSISTANT_ROLE!r}, so nothing can be learned; add one"
            )
        yield chat


def _parse_message(path: str | Path, number: int, message: Any) -> Message:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise FileError(f'{path}, line {number}: a message must be {{"role": "user", "content": "…"}} with two strings')
    return Message(role, content)
