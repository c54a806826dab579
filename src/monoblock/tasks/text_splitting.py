"""Read lines of text as UTF-8, and split texts that are longer than a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from monoblock.errors import FileError, InputError

BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it
SENTENCE_END = re.compile(r"([.!?…।॥。！？][\"'”’»)]*)\s+")  # with closing quotes and parentheses


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream without line ends; `name` is the name of the stream in errors."""
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            location = f"{name}, line {number}, byte {problem.start + 1}"
            raise FileError(f"{location}: not UTF-8 (0x{raw[problem.start]:02x}); convert the text to UTF-8") from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def split_text(text: str, fits: Callable[[str], bool], *, pack: bool = True) -> list[str]:
    """Split a text after sentences into parts for which `fits` is true; split longer sentences at spaces.

    pack: put as many sentences as fit into a part; otherwise each sentence is a part of its own.
    """
    if fits(text):
        return [text]
    parts: list[str] = []
    for sentence in split_sentences(text):
        if fits(sentence):
            parts.append(sentence)
        else:
            parts += _pack(sentence.split(), fits)
    return _pack(parts, fits) if pack else parts


def split_sentences(text: str) -> list[str]:
    """Split a text at the ends of its sentences; only the space between them is lost."""
    *pairs, last = SENTENCE_END.split(text)
    sentences = [f"{sentence}{end}" for sentence, end in zip(pairs[::2], pairs[1::2], strict=True)]
    return [sentence for sentence in (*sentences, last) if sentence.strip()]


def _pack(parts: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Join neighbouring parts as long as they fit."""
    packed: list[str] = []
    for part in parts:
        if not fits(part):
            raise InputError(f"{part[:40]!r} is longer than the model reads, and has no space to be split at")
        if packed and fits(f"{packed[-1]} {part}"):
            packed[-1] = f"{packed[-1]} {part}"
        else:
            packed.append(part)
    return packed
