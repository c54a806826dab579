"""Output of the verbs: text, JSON, tables, suggestions of a next command, and the progress of a long operation."""

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, Self, TypeVar

import click

from monoblock.metrics.numbers import format_bytes as format_bytes, format_count as format_count
from monoblock.untrusted_files import show_controls

T = TypeVar("T")

COLUMN_GAP = 2  # characters between two columns of a table
MIN_TEXT_WIDTH = 12  # characters: text columns are never made narrower than this
DELAY_SECONDS = 2.0  # before anything is shown
LINE_SECONDS = 5.0  # between two plain lines

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


def report(as_json: bool, result: T, print_text: Callable[[T], None], next_command: str) -> None:
    """Print a result, as JSON or as text, and suggest a command to run next."""
    if as_json:
        print_json(result)
    else:
        print_text(result)
    suggest_next(next_command)


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


class ProgressBar:
    """Show how many items are finished: call the object with the number of items just done. `total` may be unknown.

    done: the number of items that were finished before.
    The unit "bytes" is shown as MB and GB, with the rate.
    """

    def __init__(self, unit: str, total: int | None = None, done: int = 0) -> None:
        self.unit, self.total, self.done, self.first = unit, total, done, done
        self.bar: Any = None
        self.start_time = self.last_line_time = 0.0

    def __enter__(self) -> Self:
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time + DELAY_SECONDS - LINE_SECONDS
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if sys.stderr.isatty():
            self._update_bar(now)
        elif now - self.last_line_time >= LINE_SECONDS:
            self.last_line_time = now
            rate = (self.done - self.first) / max(1e-9, now - self.start_time)
            if self.unit == "bytes":
                total = "" if self.total is None else f" of {format_bytes(self.total)}"
                line = f"{format_bytes(self.done)}{total}, {format_bytes(int(rate))} per second"
            else:
                total = "" if self.total is None else f" of {self.total:,}"
                line = f"{self.done:,}{total} {self.unit}, {rate:,.0f} per second"
            echo(line, err=True)

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and count them."""
        for item in items:
            self(1)
            yield item

    def _update_bar(self, now: float) -> None:
        if self.bar is None and now - self.start_time >= DELAY_SECONDS:
            from rich import progress
            from rich.console import Console

            counts: tuple[Any, ...] = (progress.MofNCompleteColumn(),)
            if self.unit == "bytes":
                counts = (progress.DownloadColumn(), progress.TransferSpeedColumn())
            columns = (progress.TextColumn(self.unit), progress.BarColumn(), *counts, progress.TimeRemainingColumn())
            self.bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.bar.add_task("", total=self.total)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
