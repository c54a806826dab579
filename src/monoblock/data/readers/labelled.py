"""Read texts with a class label, for classification, from tables or .jsonl objects."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from monoblock.data.readers.columns import (
    LABEL_COLUMNS,
    TableRow,
    check_columns,
    check_width,
    find_columns,
    header_kind,
    read_table,
)
from monoblock.data.readers.holdout import is_number
from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines, read_jsonl, string_field
from monoblock.data.readers.records import LabelledText, TaggedSentence
from monoblock.errors import FileError

FORMATS = {2: "label<TAB>text", 3: "label<TAB>text<TAB>text"}  # number of columns: their meaning


def read_labelled(path: str | Path) -> Iterator[LabelledText]:
    """Yield the labelled texts of a .csv file, a tab-separated file or a .jsonl file.

    The first line of a .csv file names its columns: label, text and optionally text_pair, the second text. So may that
    of a tab-separated file; without such a line, its columns are the label, the text and optionally the second text.
    Objects of a .jsonl file have the keys "label", "text" and optionally "text_pair".
    """
    if Path(path).suffix == ".jsonl":
        yield from _read_jsonl_labelled(path)
        return
    table = read_table(path)
    first = next(table)
    if Path(path).suffix == ".csv":
        check_columns(path, first.cells, "labelled")
    if header_kind(first.cells) == "labelled":
        yield from _read_named_columns(path, first.cells, table)
        return
    rows = list(_read_columns(path, chain([first], table)))
    _check_header(path, first, [row.label for row in rows])
    yield from rows


def _read_named_columns(path: str | Path, header: list[str], table: Iterator[TableRow]) -> Iterator[LabelledText]:
    columns = find_columns(header, LABEL_COLUMNS)
    for row in table:
        check_width(path, row, header)
        cells = {name: row.cells[index].strip() for name, index in columns.items()}
        yield LabelledText(cells["text"], _check_label(path, row.number, cells["label"]), cells.get("text_pair"))


def _read_columns(path: str | Path, table: Iterator[TableRow]) -> Iterator[LabelledText]:
    columns = 0
    for number, cells in table:
        if len(cells) not in FORMATS or columns not in (0, len(cells)):
            raise column_error(path, number, len(cells), FORMATS.get(columns, " or ".join(FORMATS.values())))
        columns = len(cells)
        label = _check_label(path, number, cells[0].strip())
        yield LabelledText(cells[1].strip(), label, cells[2].strip() if columns == 3 else None)


def _check_label(path: str | Path, number: int, label: str) -> str:
    if not label:
        raise FileError(f"{path}, line {number}: the label is empty; fill it, or delete the line")
    return label


def _check_header(path: str | Path, first: TableRow, labels: list[str]) -> None:
    """Raise FileError if all labels are numbers except that of the first line, which then is a header."""
    if len(labels) > 2 and not is_number(labels[0]) and all(map(is_number, labels[1:])):
        raise FileError(
            f"{path}, line {first.number}: the label {labels[0]!r:.40} is not a number, but all others are; "
            "if this line names the columns, call them label and text, or delete it"
        )


def _read_jsonl_labelled(path: str | Path) -> Iterator[LabelledText]:
    for number, row in read_jsonl(path):
        text_pair = None if row.get("text_pair") is None else string_field(path, number, row, "text_pair")
        text, label = (string_field(path, number, row, name) for name in ("text", "label"))
        yield LabelledText(text, label, text_pair)


# -- tagged words, in the columns of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003) -----------------------

WORD_COLUMN_NAMES = ("word", "words", "token", "tokens", "form")
LABEL_COLUMN_NAMES = ("label", "labels", "tag", "tags", "ner", "ner_tag", "ner_tags", "pos", "upos")


def read_conll(path: str | Path) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file that has one word per line and a blank line between sentences.

    Columns are separated by white space; the first is the word and the last its label. A line that begins with
    -DOCSTART- separates sentences like a blank line, and begins a document. A first line that names the columns,
    such as "word label", is skipped.
    """
    words: list[str] = []
    labels: list[str] = []
    empty, columns, document = True, 0, 0
    for number, line in numbered_lines(path):
        cells = line.split()
        if number == 1 and _is_header(cells):
            continue
        if cells and cells[0] != "-DOCSTART-":
            columns = columns or len(cells)
            if len(cells) != columns or columns < 2:
                raise column_error(path, number, len(cells), f"word … label ({max(columns, 2)} columns)")
            words.append(cells[0])
            labels.append(cells[-1])
        elif words:
            empty = False
            yield TaggedSentence(tuple(words), tuple(labels), document)
            words, labels = [], []
        document += bool(cells) and cells[0] == "-DOCSTART-"
    if words:
        yield TaggedSentence(tuple(words), tuple(labels), document)
    elif empty:
        raise empty_file_error(path)


def _is_header(cells: list[str]) -> bool:
    names = [cell.casefold() for cell in cells]
    return len(names) > 1 and names[0] in WORD_COLUMN_NAMES and names[-1] in LABEL_COLUMN_NAMES
