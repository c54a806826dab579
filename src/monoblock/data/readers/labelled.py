"""Read texts with a class label, for classification, from tab-separated columns or .jsonl objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.data.readers.records import LabelledText

FORMATS = {2: "label<TAB>text", 3: "label<TAB>text<TAB>text"}  # number of columns: their meaning


def read_labelled(path: str | Path) -> Iterator[LabelledText]:
    """Yield the labelled texts of a tab-separated file or a .jsonl file.

    The columns are the label, the text and optionally a second text. Objects of a .jsonl file have the keys "label",
    "text" and optionally "text_pair", the second text.
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
