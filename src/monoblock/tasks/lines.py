"""Lines of text to be translated: read as UTF-8 with their numbers, and cut where one is longer than a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from monoblock.errors import FileError, InputError

MARK = "\ufeff"  # some editors begin a file with it
SENTENCES = re.compile(r"(?<=[.!?…।॥。！？])[\"'”’»)]*\s+")


def decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a stream of bytes without their ends; a byte that is not UTF-8 is told with its line."""
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            place = f"{name}, line {number}, byte {problem.start + 1}"
            raise FileError(f"{place}: not UTF-8 (0x{raw[problem.start]:02x}); convert the text to UTF-8") from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix(MARK) if number == 1 else line


def cut(text: str, fits: Callable[[str], bool]) -> list[str]:
    """A text in as few parts as fit: whole sentences together where they do, otherwise words."""
    if fits(text):
        return [text]
    parts: list[str] = []
    for sentence in SENTENCES.split(text):
        if fits(sentence):
            parts.append(sentence)
        else:
            parts += _packed(sentence.split(), fits)
    return _packed(parts, fits)


def _packed(parts: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Neighbours put together as long as they fit."""
    packed: list[str] = []
    for part in parts:
        if not fits(part):
            raise InputError(f"{part[:40]!r} is longer than the model reads, and has no space to be split at")
        if packed and fits(f"{packed[-1]} {part}"):
            packed[-1] = f"{packed[-1]} {part}"
        else:
            packed.append(part)
    return packed
