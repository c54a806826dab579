"""What the verbs share: the --json option, numbers for humans, tables, and the line that names the next verb."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

GAP = 2  # columns between two columns of a table
LEAST_TEXT = 12  # a column of text is not folded narrower than this

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def human_count(number: int | float) -> str:
    """Three significant digits: 65, 1.50k, 124M, 7.24B."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T", "P", "E"))


def human_bytes(number: int | float) -> str:
    """Three significant digits in powers of 1024: 512 B, 1.50 KiB, 13.5 GiB."""
    return _scaled(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"))


def _scaled(number: int | float, base: int, units: Sequence[str]) -> str:
    if abs(number) < base:
        return f"{number:.3g}{units[0]}" if isinstance(number, float) else f"{number}{units[0]}"
    size = float(number)
    for unit in units[1:]:
        size /= base
        # What would be printed decides, or 999,999 would read 1000k.
        if abs(size) < base - 0.5 or unit == units[-1]:
            break
    decimals = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{decimals}f}{unit}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stdout. Numbers stand to the right and are never cut or broken.

    A terminal folds long text into its width; into a file or a pipe, every row is one line however long.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    texts = [[_cell(cell) for cell in row] for row in rows]
    made = Table(box=None, pad_edge=False, header_style="bold")
    least = full = 0
    for place, name in enumerate(columns):
        number = any(isinstance(row[place], int | float) for row in rows)
        made.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
        width = GAP + max(cell_len(text) for text in [name, *(row[place] for row in texts)])
        full += width
        least += width if number else min(width, GAP + LEAST_TEXT)
    for row in texts:
        made.add_row(*row)
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    # rich crops what does not fit, numbers too: never tell it less than they need.
    console.width = max(least, console.width) if console.is_terminal else full
    console.print(made)


def _cell(value: object) -> str:
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


def next_verb(line: str) -> None:
    """Name the verb to try next: on stderr, because it is no part of the result."""
    click.echo(f"Try: monoblock {line}", err=True)
