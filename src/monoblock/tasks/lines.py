"""Lines of text to be translated: read as UTF-8 with their numbers, and cut where one is longer than a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from monoblock.errors import FileError, InputError

MARK = "\ufeff"  # some editors begin a file with it
ENDS = re.compile(r"([.!?…।॥。！？][\"'”’»)]*)\s+")  # of sentences, with the quotes they close


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


def cut(text: str, fits: Callable[[str], bool], *, together: bool = True) -> list[str]:
    """A text in parts that fit: whole sentences, as many `together` as do or each by itself, otherwise words."""
    if fits(text):
        return [text]
    parts: list[str] = []
    for sentence in sentences(text):
        if fits(sentence):
            parts.append(sentence)
        else:
            parts += _packed(sentence.split(), fits)
    return _packed(parts, fits) if together else parts


def sentences(text: str) -> list[str]:
    """A text at the ends of its sentences; nothing but the space between them is left out."""
    *pairs, last = ENDS.split(text)
    found = [f"{said}{end}" for said, end in zip(pairs[::2], pairs[1::2], strict=True)]
    return [sentence for sentence in (*found, last) if sentence.strip()]


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
