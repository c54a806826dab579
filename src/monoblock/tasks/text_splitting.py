"""Decode lines of UTF-8 text, and split texts that are longer than the context of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from monoblock.errors import FileError, InputError

BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the start of a file
SENTENCE_END = re.compile(r"([.!?…।॥。！？][\"'”’»)]*)\s+")  # includes closing quotes and parentheses


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream, without line ends; `name` is what error messages call the stream."""
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            location = f"{name}, line {number}, byte {problem.start + 1}"
            raise FileError(f"{location}: not UTF-8 (0x{raw[problem.start]:02x}); convert the text to UTF-8") from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def split_text(text: str, fits: Callable[[str], bool], *, pack: bool = True) -> list[str]:
    """Split a text into parts for which `fits` returns True; a text that fits is returned as a single part.

    The text is split between sentences, and a sentence that does not fit is split at spaces.

    pack: join neighbouring sentences into one part as long as it fits; False makes each sentence a separate part.
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
    """Split a text into sentences; only the white space between them is removed."""
    *pairs, last = SENTENCE_END.split(text)
    sentences = [f"{sentence}{end}" for sentence, end in zip(pairs[::2], pairs[1::2], strict=True)]
    return [sentence for sentence in (*sentences, last) if sentence.strip()]


def _pack(parts: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Join neighbouring parts, with a space between them, as long as they fit."""
    packed: list[str] = []
    for part in parts:
        if not fits(part):
            raise InputError(
                f"{part[:40]!r} is longer than the context of the model and has no space to split it at; shorten it"
            )
        if packed and fits(f"{packed[-1]} {part}"):
            packed[-1] = f"{packed[-1]} {part}"
        else:
            packed.append(part)
    return packed
