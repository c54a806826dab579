"""How a training run looks: a bar on a terminal, plain lines elsewhere; all on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

import click

from monoblock.cli.common import human_count
from monoblock.training.events import Chosen, Evaluated, Event, Finished, Sampled, Saved, Skipped, Stepped, Warned

LINE_EVERY = 5.0  # seconds between two plain lines
SMOOTHING = 0.95


class Drawing:
    """Give it every event; it keeps a bar with loss, speed and time left."""

    def __init__(self, steps: int, unit: str = "tokens") -> None:
        self.steps, self.unit = steps, unit
        self.bar: Any = None
        self.task: Any = None
        self.loss: float | None = None
        self.tokens, self.since, self.told = 0, 0.0, 0.0
        self.rate = 0.0
        self.first = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)

    def show(self, event: Event) -> None:
        match event:
            case Chosen(what, why):
                self.say(f"{what} ({why})")
            case Stepped():
                self._step(event)
            case Evaluated(step, metrics, best):
                shown = ", ".join(f"{k.removeprefix('val_')} {v:.4f}" for k, v in metrics.items() if k != "val_tokens")
                self.say(f"step {step}: validation {shown}{' (best)' if best else ''}")
            case Sampled(step, text):
                if text:
                    self.say(f"step {step}, a sample: {text.strip()}")
            case Saved(step, place):
                self.say(f"step {step}: saved {place}")
            case Skipped(step, reason, epoch, samples):
                self.say(f"step {step}: update skipped, {reason} (epoch {epoch}, samples {samples[:8]}…)")
            case Warned(text):
                self.say(f"warning: {text}")
            case Finished():
                self._line(force=True)

    def _step(self, event: Stepped) -> None:
        self.loss = event.loss if self.loss is None else SMOOTHING * self.loss + (1 - SMOOTHING) * event.loss
        now = time.monotonic()
        if not self.since:
            self.since, self.tokens, self.first, self.told = now, event.tokens, event.step, now
        elif now > self.since:
            self.rate = (event.tokens - self.tokens) / (now - self.since)
        self.last = event
        if self.bar is not None:
            self.bar.update(self.task, completed=event.step, description=self._text())
        else:
            self._line()

    def _text(self) -> str:
        return f"loss {self.loss:.4f}  {human_count(float(f'{self.rate:.3g}'))} {self.unit}/s"

    def _line(self, *, force: bool = False) -> None:
        """A plain line now and then, and the last one always."""
        if self.bar is not None or self.loss is None:
            return
        now = time.monotonic()
        if force or now - self.told >= LINE_EVERY:
            self.told = now
            left = (self.steps - self.last.step) * (now - self.since) / max(1, self.last.step - self.first)
            click.echo(f"step {self.last.step}/{self.steps}  {self._text()}  about {left:.0f} s left", err=True)
