"""Read tagged sentences in the column format of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monoblock.data.readers.lines import column_error, empty_file_error, numbered_lines
from monoblock.data.readers.records import TaggedSentence


def read_conll(path: str | Path) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file that has one word per line and a blank line between sentences.

    Columns are separated by white space; the first is the word and the last its label. A line that begins with
    -DOCSTART- separates sentences like a blank line, and begins a document.
    """
    words: list[str] = []
    labels: list[str] = []
    empty, columns, document = True, 0, 0
    for number, line in numbered_lines(path):
        cells = line.split()
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
