"""Progress of a long operation on stderr: a bar on a terminal, plain lines otherwise, nothing if it ends quickly."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

import click

DELAY_SECONDS = 2.0  # before anything is shown
LINE_SECONDS = 5.0  # between two plain lines


class ProgressBar:
    """Show how many items are finished: call the object with the number of items just done. `total` may be unknown."""

    def __init__(self, unit: str, total: int | None = None) -> None:
        self.unit, self.total, self.done = unit, total, 0
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
            total = "" if self.total is None else f" of {self.total:,}"
            rate = self.done / max(1e-9, now - self.start_time)
            click.echo(f"{self.done:,}{total} {self.unit}, {rate:,.0f} per second", err=True)

    def _update_bar(self, now: float) -> None:
        if self.bar is None and now - self.start_time >= DELAY_SECONDS:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(self.unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.bar.add_task("", total=self.total)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
