"""Read tagged sentences in the column format of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines
from monoblock.data.readers.records import TaggedSentence

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
