"""Read pairs of texts from tab-separated columns, .jsonl objects or two aligned files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.data.readers.records import Pair
from monoblock.errors import FileError

# The keys of source and target in a .jsonl file: our own, and those in Aksharantar (Madhani et al. 2023).
PAIR_KEYS = (("source", "target"), ("english word", "native word"))


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Yield the pairs of a tab-separated file or of a .jsonl or .json file with one JSON object per line.

    The columns are the source, the target and optionally how often the pair was observed. PAIR_KEYS lists the keys of
    the JSON objects.
    """
    if Path(path).suffix in (".jsonl", ".json"):
        yield from _read_jsonl_pairs(path)
        return
    empty = True
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) not in (2, 3):
            raise column_error(path, number, len(cells), "source<TAB>target")
        if len(cells) == 3 and not (cells[2].isascii() and cells[2].isdigit()):
            raise FileError(f"{path}, line {number}: the third column {cells[2]!r:.40} is not a count; write a number")
        if not (cells[0].strip() and cells[1].strip()):
            raise _empty_side_error(path, number)
        empty = False
        yield Pair(cells[0].strip(), cells[1].strip(), int(cells[2]) if len(cells) == 3 else 1)
    if empty:
        raise empty_file_error(path)


def _read_jsonl_pairs(path: str | Path) -> Iterator[Pair]:
    for number, row in read_jsonl(path):
        keys = next((keys for keys in PAIR_KEYS if keys[0] in row), PAIR_KEYS[0])
        source, target = (string_field(path, number, row, key).strip() for key in keys)
        if not (source and target):
            raise _empty_side_error(path, number)
        yield Pair(source, target)


def read_aligned_pairs(source: str | Path, target: str | Path) -> Iterator[Pair]:
    """Yield pairs from two files aligned line by line, such as train.de and train.en."""
    empty = True
    for source_line, target_line in zip_longest(numbered_lines(source), numbered_lines(target)):
        if source_line is None or target_line is None:
            short, number = (source, target_line[0]) if source_line is None else (target, source_line[0])
            raise FileError(
                f"{short} ends before line {number} of the other file; give files with the same number of lines"
            )
        left, right = source_line[1].strip(), target_line[1].strip()
        if bool(left) != bool(right):
            file = source if not left else target
            raise FileError(
                f"{file}, line {source_line[0]}: empty where the other file has text; fill both lines or neither"
            )
        if left:
            empty = False
            yield Pair(left, right)
    if empty:
        raise empty_file_error(source)


def _empty_side_error(path: str | Path, number: int) -> FileError:
    return FileError(f"{path}, line {number}: one side of the pair is empty; fill it, or delete the line")
