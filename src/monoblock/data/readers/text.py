"""Read UTF-8 files: lines, JSON objects, documents of plain text, and conversations.

Readers are generators, so that a file is never in memory as a whole. A malformed file raises FileError, whose message
names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monoblock.data.readers.records import Chat, DocumentBoundaries, Message
from monoblock.errors import FileError
from monoblock.untrusted_files import open_regular

BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the beginning of a file


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for each line of a UTF-8 file, counted from 1 and without the line break."""
    number = 0
    try:
        with open_regular(path) as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except UnicodeDecodeError:
        raise utf8_error(path, number) from None
    except OSError as problem:
        raise read_error(path, problem) from None


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a file with one JSON object per line; blank lines are skipped."""
    empty = True
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError:
            raise FileError(f"{path}, line {number}: not JSON (it is nested too deep)") from None
        except ValueError as problem:
            raise FileError(f"{path}, line {number}: not JSON ({problem!s:.60})") from None
        if not isinstance(row, dict):
            raise FileError(f'{path}, line {number}: not an object; write a JSON object such as {{"text": "…"}}')
        empty = False
        yield number, row
    if empty:
        raise empty_file_error(path)


def string_field(path: str | Path, number: int, row: dict[str, Any], name: str) -> str:
    """Return the string at the key `name` of `row`, the JSON object on line `number`; a "label" may be an integer."""
    value = row.get(name)
    if name == "label" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise FileError(f'{path}, line {number}: "{name}" is missing or not a string')
    return value


def column_error(path: str | Path, number: int, columns: int, expected: str) -> FileError:
    return FileError(f"{path}, line {number}: {columns} column{'s' * (columns != 1)}; write {expected} on each line")


def empty_file_error(path: str | Path) -> FileError:
    return FileError(f"{path} is empty; give a file with at least one line of text")


def utf8_error(path: str | Path, number: int) -> FileError:
    return FileError(f"{path}, line {number}: a byte is not UTF-8; save the file as UTF-8")


def read_error(path: str | Path, problem: OSError) -> FileError:
    return FileError(f"{path} cannot be read: {problem.strerror or problem}")


def read_text(path: str | Path, document_boundaries: DocumentBoundaries = "file") -> Iterator[str]:
    """Yield the documents of a text file: the whole file, or with "blank-lines" each of its paragraphs."""
    empty = True
    for document in _split_at_blank_lines(path) if document_boundaries == "blank-lines" else _read_whole_file(path):
        empty = empty and not document.strip()
        yield document
    if empty:
        raise empty_file_error(path)


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield every line of a file as a document, including empty lines.

    Word-level language models predict an end-of-sentence token after every line, even after an empty one.
    """
    for _, line in numbered_lines(path):
        yield line


def _read_whole_file(path: str | Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            raw = file.read()
        yield raw.decode("utf-8").removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        raise utf8_error(path, raw.count(b"\n", 0, problem.start) + 1) from None
    except OSError as problem:
        raise read_error(path, problem) from None


def _split_at_blank_lines(path: str | Path) -> Iterator[str]:
    paragraph: list[str] = []
    for _, line in numbered_lines(path):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


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
        for message in messages:
            values = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
            if not all(isinstance(value, str) for value in values):
                raise FileError(
                    f'{path}, line {number}: a message must be {{"role": "user", "content": "…"}} with two strings'
                )
        chat = Chat(tuple(Message(message["role"], message["content"]) for message in messages))
        if not any(message.role == ASSISTANT_ROLE for message in chat.messages):
            raise FileError(
                f"{path}, line {number}: no message has the role {ASSISTANT_ROLE!r}, so nothing can be learned; add one"
            )
        yield chat
