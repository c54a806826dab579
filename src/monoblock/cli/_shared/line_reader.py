"""Read lines from arguments, a file or standard input, and group them into chunks for prediction."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from monoblock.untrusted_files import bounded_lines, reading, standard_input

T = TypeVar("T")

CHUNK_SIZE = 2048  # lines


def read_lines(texts: Sequence[str] = (), file: Path | None = None) -> Iterator[str]:
    """Yield the lines of `texts` if there are any, else of `file` if it is given, else of standard input."""
    from monoblock.tasks.text_splitting import decode_lines

    if texts:
        for text in texts:
            yield from text.split("\n")
    elif file is not None:
        with reading(file), file.open("rb") as stream:
            yield from decode_lines(bounded_lines(stream, str(file)), str(file))
    else:
        yield from decode_lines(bounded_lines(standard_input(), "standard input"), "standard input")


def chunk_lines(lines: Iterable[T]) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of the first line, lines) for chunks of CHUNK_SIZE lines.

    A chunk has one line if standard input is a terminal, so that each line is answered at once.
    """
    size, start, stream = 1 if sys.stdin.isatty() else CHUNK_SIZE, 0, iter(lines)
    while chunk := list(islice(stream, size)):
        yield start, chunk
        start += len(chunk)


def count_lines(file: Path | None) -> int | None:
    """Return the number of lines of a file; None for standard input or a pipe, which can be read only once."""
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)
