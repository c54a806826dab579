"""Read what a verb predicts from: lines of arguments, a file or standard input, and the columns of a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from monoblock.data.readers.tables import LABEL_COLUMNS, check_width, read_table
from monoblock.errors import ConfigError, FileError
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


# -- tables -----------------------------------------------------------------------------------------------------------

OPTION = "--text-column"


class Columns(NamedTuple):
    """What an input consists of: for each part, the names that its column may have."""

    parts: tuple[tuple[str, ...], ...]
    required: int  # how many of the parts every table must have


TEXT, TEXT_PAIR = LABEL_COLUMNS["text"], LABEL_COLUMNS["text_pair"]
COLUMNS = {
    "classify": Columns((TEXT, TEXT_PAIR), 1),
    "answer": Columns((("question",), ("context", "passage", "text")), 2),
    "image": Columns((("path", "file", "filename", "image", "picture"),), 1),
    "text": Columns((TEXT,), 1),
}


def is_table(file: Path | None) -> bool:
    return file is not None and file.suffix.lower() in (".csv", ".tsv")


def has_columns(file: Path | None, named: Sequence[str], columns: Columns) -> bool:
    """Return whether the columns of a file are named: those of a .csv file, and of a .tsv file with such a first line.

    named: what --text-column gives.
    """
    if file is None or not is_table(file):
        return False
    if file.suffix.lower() == ".csv" or named:
        return True
    with reading(file):
        header = [cell.strip().casefold() for cell in next(read_table(file)).cells]
    return len(header) > 1 and all(_find(header, names) for names in columns.parts[: columns.required])


def read_columns(file: Path, named: Sequence[str], columns: Columns) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each row of a table; its columns are recognized by their names, or are those in `named`."""
    with reading(file):
        rows = read_table(file)
        header = next(rows).cells
        indices = _named_indices(file, header, named, columns) if named else _known_indices(file, header, columns)
        for row in rows:
            check_width(file, row, header)
            yield tuple(row.cells[index] for index in indices)


def _find(header: Sequence[str], names: Sequence[str]) -> list[int]:
    return [index for index, cell in enumerate(header) if cell in names]


def _known_indices(file: Path, header: Sequence[str], columns: Columns) -> list[int]:
    cells, indices = [cell.strip().casefold() for cell in header], []
    for number, names in enumerate(columns.parts):
        found = _find(cells, names)
        if len(found) > 1:
            several = " and ".join(header[index].strip() for index in found[:2])
            raise FileError(f"{file} has the columns {several:.60}; say which to read: {OPTION} {header[found[0]]:.30}")
        if not found and number < columns.required:
            raise FileError(
                f"{file}: the first line {', '.join(map(str.strip, header))!r:.60} has no column named "
                f"{' or '.join(names[:3])}; name the column to read: {OPTION} NAME"
            )
        indices += found
    return indices


def _named_indices(file: Path, header: Sequence[str], named: Sequence[str], columns: Columns) -> list[int]:
    least, most = columns.required, len(columns.parts)
    if not least <= len(named) <= most:
        count = str(most) if least == most else f"{least} or {most}"
        raise ConfigError(f"{OPTION} is given {len(named)} times, but this model reads {count} columns; give {count}")
    cells = [cell.strip().casefold() for cell in header]
    for name in named:
        if cells.count(name.casefold()) != 1:
            has = ", ".join(cell.strip() for cell in header)
            raise ConfigError(f"{OPTION} {name}: the first line of {file} is {has!r:.80}; give one of these names")
    return [cells.index(name.casefold()) for name in named]
