"""Output shared by the verbs: the --json option, readable numbers, tables, and suggestions of a next command."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from monoblock.runs.numbers import format_bytes as format_bytes, format_count as format_count

COLUMN_GAP = 2  # characters between two columns of a table
MIN_TEXT_WIDTH = 12  # characters: text columns are never made narrower than this

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout, with numbers right-aligned and never broken across lines.

    On a terminal, long text is wrapped to the width of the terminal; in a file or a pipe, every row is one line.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    texts = [[_format_cell(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    min_width = full_width = 0
    for index, name in enumerate(columns):
        is_number = any(_is_number(row[index]) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
        width = COLUMN_GAP + max(cell_len(text) for text in [name, *(row[index] for row in texts)])
        full_width += width
        min_width += width if is_number else min(width, COLUMN_GAP + MIN_TEXT_WIDTH)
    for row in texts:
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    # rich crops columns that do not fit, numbers included, so the width is never less than the numbers need.
    console.width = max(min_width, console.width) if console.is_terminal else full_width
    console.print(table)


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
    click.echo(f"Try: monoblock {line}", err=True)
