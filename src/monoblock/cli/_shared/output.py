"""Output shared by the verbs: the --json option, readable numbers, tables, and suggestions of a next command."""

import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import click

from monoblock.metrics.numbers import format_bytes as format_bytes, format_count as format_count
from monoblock.untrusted_files import show_controls

COLUMN_GAP = 2  # characters between two columns of a table
MIN_TEXT_WIDTH = 12  # characters: text columns are never made narrower than this

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


JSON_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")  # which JSON may have as they are; it escapes the others


def echo(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Print a text as it is; on a terminal with a style, and with its control characters made visible.

    Control characters may come from a model, a tokenizer or a file.
    style: arguments of `click.style`, such as fg="black".
    """
    shown = str(text)
    if (sys.stderr if err else sys.stdout).isatty():
        shown = show_controls(shown)
        shown = click.style(shown, **style) if style else shown
    click.echo(shown, err=err, nl=nl, color=True)  # color=True: click would remove escapes from a file


def dump_json(value: Any, indent: int | None = None) -> str:
    """Return JSON with letters of all languages as they are, but control characters escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return JSON_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: Any) -> None:
    click.echo(dump_json(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], narrow: Collection[str] = ()) -> None:
    """Print a table on stdout, with numbers right-aligned and never broken across lines.

    On a terminal, long text is wrapped to the width of the terminal, in columns named in `narrow` before others; in a
    file or a pipe, every row is one line.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    show = show_controls if console.is_terminal else str
    texts = [[show(_format_cell(cell)) for cell in row] for row in rows]
    numbers = [any(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    cells = [[name, *(row[index] for row in texts)] for index, name in enumerate(columns)]
    widths = _fit_widths(cells, numbers, [name in narrow for name in columns], console.width)
    if not console.is_terminal:
        widths = [_text_width(column) for column in cells]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, is_number, width in zip(columns, numbers, widths, strict=True):
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(name, justify=justify, no_wrap=is_number, overflow="fold", width=width)
    for row in texts:
        table.add_row(*row)
    console.width = sum(widths) + COLUMN_GAP * len(widths)  # rich crops columns that do not fit, numbers included
    console.print(table)


def _text_width(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def _fit_widths(
    columns: Sequence[Sequence[str]], numbers: Sequence[bool], narrow: Sequence[bool], total: int
) -> list[int]:
    """Return widths with which the columns fit into `total` characters, if possible without breaking words."""
    widths = [_text_width(column) for column in columns]
    words = [_text_width(word for text in column for word in text.split()) for column in columns]
    unbroken = [width if is_number else word for width, word, is_number in zip(widths, words, numbers, strict=True)]
    smallest = [
        width if is_number else min(width, MIN_TEXT_WIDTH) for width, is_number in zip(widths, numbers, strict=True)
    ]
    first = [word if is_narrow else width for width, word, is_narrow in zip(widths, unbroken, narrow, strict=True)]
    for limits in (first, unbroken, smallest):
        while sum(widths) + COLUMN_GAP * (len(widths) - 1) > total:
            room = [width - limit for width, limit in zip(widths, limits, strict=True)]
            wide = [index for index in range(len(widths)) if room[index] > 0]
            if not wide:
                break
            widths[max(wide, key=lambda index: widths[index])] -= 1
    return widths


def _is_number(cell: object) -> bool:
    """Whether a cell is a number, also one that is written in percent or in percentage points."""
    return isinstance(cell, int | float) or (isinstance(cell, str) and cell.endswith((" %", " points")))


def _format_cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)


def suggest_next(line: str) -> None:
    """Suggest a command to run next; on stderr, because it is not part of the result."""
    echo(f"Try: monoblock {line}", err=True)
