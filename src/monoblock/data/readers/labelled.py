"""Texts with a class label, for classification: tab-separated columns or .jsonl objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.data.readers.records import LabelledText

FORMATS = {2: "label<TAB>text", 3: "label<TAB>text<TAB>text"}  # by number of columns


def read_labelled(path: str | Path) -> Iterator[LabelledText]:
    """Yield the rows of a tab-separated file (FORMATS), or of .jsonl objects with "text", "label" and "text_pair".

    "text_pair" is optional.
    """
    if Path(path).suffix == ".jsonl":
        yield from _read_jsonl_labelled(path)
        return
    columns = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) not in FORMATS or columns not in (0, len(cells)):
            raise column_error(path, number, len(cells), FORMATS.get(columns, " or ".join(FORMATS.values())))
        columns = len(cells)
        yield LabelledText(cells[1].strip(), cells[0].strip(), cells[2].strip() if columns == 3 else None)
    if not columns:
        raise empty_file_error(path)


def _read_jsonl_labelled(path: str | Path) -> Iterator[LabelledText]:
    for number, row in read_jsonl(path):
        text_pair = None if row.get("text_pair") is None else string_field(path, number, row, "text_pair")
        text, label = (string_field(path, number, row, name) for name in ("text", "label"))
        yield LabelledText(text, label, text_pair)
