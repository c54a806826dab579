"""Read pairs of texts from tables, .jsonl objects or two aligned files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from warnings import warn

from monoblock.data.readers.columns import (
    REQUIRED_COLUMNS,
    TableRow,
    check_columns,
    check_width,
    find_columns,
    find_pair_columns,
    header_kind,
    is_count,
    read_table,
)
from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.data.readers.records import Pair
from monoblock.errors import FileError

POSITIONS = {"source": 0, "target": 1, "frequency": 2}  # of the columns of a file without a header
# The keys of source and target in a .jsonl file: our own, and those in Aksharantar (Madhani et al. 2023).
PAIR_KEYS = (("source", "target"), ("english word", "native word"))


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Yield the pairs of a .csv file, of a tab-separated file, or of a .jsonl or .json file with one object per line.

    The columns are the source, the target and optionally how often the pair was observed. The first line of a .csv file
    names them (source, target, frequency, or two languages), and so may that of a tab-separated file; where its names
    are other words than source and target, a warning says that they are not read as a pair. PAIR_KEYS lists the keys of
    the JSON objects.
    """
    if Path(path).suffix in (".jsonl", ".json"):
        yield from _read_jsonl_pairs(path)
        return
    table = read_table(path)
    first = next(table)
    is_csv = Path(path).suffix == ".csv"
    if is_csv or header_kind(first.cells) == "labelled":
        check_columns(path, first.cells, "pairs")
    named, second = find_pair_columns(first.cells), next(table, None)
    if not is_csv and _is_inferred_header(first, second, named):
        warn(
            f"{path}: the first line, {', '.join(map(str.strip, first.cells))!r:.60}, is read as names of columns; "
            "if it is a pair, write source<TAB>target above it",
            stacklevel=2,
        )
        named = named or dict(POSITIONS)
    rows = chain([] if second is None else [second], table)
    columns = named or dict(POSITIONS)
    for row in rows if named else chain([first], rows):
        if named:
            check_width(path, row, first.cells)
        elif len(row.cells) not in (2, 3):
            raise column_error(path, row.number, len(row.cells), "source<TAB>target")
        yield _parse_pair(path, row, columns)


def _is_inferred_header(first: TableRow, second: TableRow | None, named: Mapping[str, int]) -> bool:
    """Return whether a first line names columns in other words than ours: two languages, or a word above counts."""
    if named:
        return len(find_columns(first.cells, REQUIRED_COLUMNS["pairs"])) < len(REQUIRED_COLUMNS["pairs"])
    rows = [first, second]
    first_counts, second_counts = (
        row is not None and len(row.cells) == len(POSITIONS) and is_count(row.cells[-1].strip()) for row in rows
    )
    return second_counts and not first_counts and len(first.cells) == len(POSITIONS)


def _parse_pair(path: str | Path, row: TableRow, columns: Mapping[str, int]) -> Pair:
    cells = {name: row.cells[index].strip() for name, index in columns.items() if index < len(row.cells)}
    frequency = cells.get("frequency", "1")
    if not is_count(frequency):
        raise FileError(f"{path}, line {row.number}: the third column {frequency!r:.40} is not a count; write a number")
    if not (cells["source"] and cells["target"]):
        raise _empty_side_error(path, row.number)
    return Pair(cells["source"], cells["target"], int(frequency))


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
