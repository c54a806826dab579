"""How far something is: a bar on a terminal, plain lines elsewhere; on stderr, and only where it takes a while."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

import click

PATIENCE = 2.0  # seconds before anything is said
LINE_EVERY = 5.0  # seconds between two plain lines


class Ongoing:
    """Tell it how many more are done; `total` may be unknown."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.bar: Any = None
        self.begun = self.told = 0.0

    def __enter__(self) -> Self:
        self.begun = time.monotonic()
        self.told = self.begun + PATIENCE - LINE_EVERY
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if sys.stderr.isatty():
            self._draw(now)
        elif now - self.told >= LINE_EVERY:
            self.told = now
            of = "" if self.total is None else f" of {self.total:,}"
            rate = self.done / max(1e-9, now - self.begun)
            click.echo(f"{self.done:,}{of} {self.what}, {rate:,.0f} a second", err=True)

    def _draw(self, now: float) -> None:
        if self.bar is None and now - self.begun >= PATIENCE:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(self.what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.bar.add_task("", total=self.total)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
