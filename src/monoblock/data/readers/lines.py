"""Read numbered lines and JSON objects from UTF-8 files.

Readers are generators, so that a file is never in memory as a whole. A malformed file raises FileError, whose message
names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
