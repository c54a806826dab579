"""Read documents of plain text: whole files, paragraphs, lines, WikiText articles or .jsonl objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from monoblock.data.readers.columns import TEXT_COLUMNS, check_columns, check_width, find_columns, read_table
from monoblock.data.readers.lines import (
    BYTE_ORDER_MARK,
    empty_file_error,
    numbered_lines,
    read_error,
    read_jsonl,
    string_field,
    utf8_error,
)
from monoblock.data.readers.records import DocumentBoundaries
from monoblock.untrusted_files import open_regular


def read_text(path: str | Path, document_boundaries: DocumentBoundaries = "file") -> Iterator[str]:
    """Yield the documents of a text file: the whole file, or with "blank-lines" each of its paragraphs."""
    empty = True
    for document in _split_at_blank_lines(path) if document_boundaries == "blank-lines" else _read_whole_file(path):
        empty = empty and not document.strip()
        yield document
    if empty:
        raise empty_file_error(path)


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield every line of a file as a document, including empty lines.

    Word-level language models predict an end-of-sentence token after every line, even after an empty one.
    """
    for _, line in numbered_lines(path):
        yield line


def read_wikitext_articles(path: str | Path) -> Iterator[str]:
    """Yield the articles of a WikiText file, each of which begins with the line ` = Title = `.

    Concatenated, the articles are the whole file.
    """
    article: list[str] = []
    for _, line in numbered_lines(path):
        # Section headings have more equals signs: ` = = Early life = = `.
        is_title = line.startswith(" = ") and line.endswith(" = ") and not line.startswith(" = = ")
        if is_title and any(map(str.strip, article)):
            yield "\n".join(article) + "\n"
            article = []
        article.append(line)
    if not any(map(str.strip, article)):
        raise empty_file_error(path)
    yield "\n".join(article) + "\n"


def read_documents(path: str | Path) -> Iterator[str]:
    """Yield the documents of a .jsonl or .csv file: the value of "text" in each object, or the column "text"."""
    if Path(path).suffix == ".csv":
        yield from _read_text_column(path)
        return
    for number, row in read_jsonl(path):
        yield string_field(path, number, row, "text")


def _read_text_column(path: str | Path) -> Iterator[str]:
    table = read_table(path)
    header = next(table).cells
    check_columns(path, header, "text")
    index = find_columns(header, TEXT_COLUMNS)["text"]
    for row in table:
        check_width(path, row, header)
        yield row.cells[index]


def _read_whole_file(path: str | Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            raw = file.read()
        yield raw.decode("utf-8").removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        raise utf8_error(path, raw.count(b"\n", 0, problem.start) + 1) from None
    except OSError as problem:
        raise read_error(path, problem) from None


def _split_at_blank_lines(path: str | Path) -> Iterator[str]:
    paragraph: list[str] = []
    for _, line in numbered_lines(path):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)
