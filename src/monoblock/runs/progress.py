"""Show the progress of a training run on stderr: as a bar on a terminal or in a notebook, else as plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from monoblock.metrics.numbers import format_count
from monoblock.metrics.table import format_metric
from monoblock.training.events import (
    METRICS_FILE,
    CheckpointEvent,
    DecisionEvent,
    EvaluationEvent,
    FinishedEvent,
    SampleEvent,
    SkippedUpdateEvent,
    StepEvent,
    TrainingEvent,
    WarningEvent,
    read_metrics,
)
from monoblock.untrusted_files import show_controls

if TYPE_CHECKING:
    from monoblock.runs.run import Run

LINE_SECONDS = 5.0  # minimum time between two plain lines
SMOOTHING = 0.95  # weight of the previous value in the smoothed loss


class TrainingProgress:
    """Show the events of a training run, with a smoothed loss, the speed and the time left."""

    def __init__(self, steps: int, unit: str = "tokens", *, hidden: bool = False) -> None:
        self.steps, self.unit, self.hidden = steps, unit, hidden
        self.bar: Any = None
        self.task: Any = None
        self.loss: float | None = None
        self.earlier_losses: dict[int, float] = {}  # of the steps before the run was resumed
        self.start_tokens, self.start_time, self.last_line_time = 0, 0.0, 0.0
        self.tokens_per_second = 0.0
        self.start_step = self.last_step = self.printed_step = 0

    def __enter__(self) -> Self:
        if self.hidden:
            return self
        from rich.console import Console

        console = Console(stderr=True)
        if sys.stderr.isatty() or console.is_jupyter:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=console)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def print_line(self, text: str) -> None:
        text = show_controls(text) if sys.stderr.isatty() else text  # a sample may have any character
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def handle_event(self, event: TrainingEvent) -> None:
        if self.hidden:
            return
        match event:
            case DecisionEvent(decision, reason):
                self.print_line(f"{decision} ({reason})")
            case StepEvent():
                self._handle_step(event)
            case EvaluationEvent(step, metrics, is_best):
                values = [
                    f"{name.removeprefix('val_')} {format_metric(name, value, '.4f')}"
                    for name, value in metrics.items()
                    if name != "val_tokens"
                ]
                self.print_line(f"step {step}: validation {', '.join(values)}{' (best)' if is_best else ''}")
            case SampleEvent(step, text):
                if text:
                    self.print_line(f"step {step}: sample: {text.strip()}")
            case CheckpointEvent(step, path):
                self.print_line(f"step {step}: saved {path}")
            case SkippedUpdateEvent(step, reason, epoch, samples):
                self.print_line(f"step {step}: update skipped, {reason} (epoch {epoch}, samples {samples[:8]}…)")
            case WarningEvent(text):
                self.print_line(f"warning: {text}")
            case FinishedEvent():
                self._print_status(force=True)

    def _handle_step(self, event: StepEvent) -> None:
        losses = [loss for step, loss in self.earlier_losses.items() if step < event.step]
        self.earlier_losses = {}
        for loss in (*losses, event.loss):
            self.loss = loss if self.loss is None else SMOOTHING * self.loss + (1 - SMOOTHING) * loss
        now = time.monotonic()
        if not self.start_time:
            self.start_time = self.last_line_time = now
            self.start_tokens, self.start_step = event.tokens, event.step
        elif now > self.start_time:
            self.tokens_per_second = (event.tokens - self.start_tokens) / (now - self.start_time)
        self.last_step = event.step
        if self.bar is not None:
            self.bar.update(self.task, completed=event.step, description=self._status_text())
        else:
            self._print_status()

    def _status_text(self) -> str:
        return f"loss {self.loss:.4f} (smoothed)  {format_count(float(f'{self.tokens_per_second:.3g}'))} {self.unit}/s"

    def _print_status(self, *, force: bool = False) -> None:
        """Print a plain status line if LINE_SECONDS have passed since the last one, or if `force`; once for a step."""
        if self.bar is not None or self.loss is None or self.printed_step == self.last_step:
            return
        now = time.monotonic()
        if force or now - self.last_line_time >= LINE_SECONDS:
            self.last_line_time, self.printed_step = now, self.last_step
            seconds_per_step = (now - self.start_time) / max(1, self.last_step - self.start_step)
            left = (self.steps - self.last_step) * seconds_per_step
            rest = f"  about {left:.0f} s left" if self.last_step < self.steps else ""
            self.print_line(f"step {self.last_step}/{self.steps}  {self._status_text()}{rest}")


def train_to_end(
    run: Run,
    progress: TrainingProgress,
    *,
    resume: bool,
    callbacks: Sequence[Callable[[TrainingEvent], object]] = (),
) -> FinishedEvent:
    """Train until the run ends or is interrupted, and return its last event.

    callbacks: functions that are called with each event.
    """
    last: TrainingEvent | None = None
    if resume and (run.folder / METRICS_FILE).is_file():
        progress.earlier_losses = {row["step"]: row["loss"] for row in read_metrics(run.folder) if "loss" in row}
    with progress:
        for last in run.events(resume=resume):
            progress.handle_event(last)
            for callback in callbacks:
                callback(last)
    assert isinstance(last, FinishedEvent)
    return last
