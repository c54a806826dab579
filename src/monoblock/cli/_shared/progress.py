"""Progress of a long operation on stderr: a bar on a terminal, plain lines otherwise, nothing if it ends quickly."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from monoblock.cli._shared.output import echo
from monoblock.metrics.numbers import format_bytes

DELAY_SECONDS = 2.0  # before anything is shown
LINE_SECONDS = 5.0  # between two plain lines


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
