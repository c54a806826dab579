"""metrics.jsonl: one line a step, evaluations and skipped updates between; optionally TensorBoard."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.training.events import Evaluated, Event, Skipped, Stepped

FILE = "metrics.jsonl"


class Metrics:
    """Appends events to a run folder's metrics; lines after a resumed step are taken back first.  Mute, it is still."""

    def __init__(self, folder: Path, *, tensorboard: bool = False, mute: bool = False) -> None:
        self.path, self.mute = folder / FILE, mute
        self.file: Any = None
        self.writer: Any = None
        if tensorboard and not mute:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise FileError("--tensorboard needs the package tensorboard; install monoblock[track]") from None
            self.writer = SummaryWriter(folder / "tensorboard")

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`: the run goes on from there."""
        if self.mute or not self.path.exists():
            return
        kept = [line for line in _lines(self.path) if _step(line) <= step]
        beside = self.path.with_suffix(".tmp")
        try:
            beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(beside, self.path)
        except OSError as problem:
            raise self._unwritable(problem) from None

    def write(self, event: Event) -> None:
        if self.mute or not isinstance(event, Stepped | Evaluated | Skipped):
            return
        line = event.line()
        try:
            if self.file is None:
                self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (kept open for the run)
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as problem:
            raise self._unwritable(problem) from None
        if self.writer is not None:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self.writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        for one in (self.file, self.writer):
            if one is not None:
                with suppress(OSError):  # what could not be written has been said
                    one.close()

    def _unwritable(self, problem: OSError) -> FileError:
        return FileError(f"{self.path} cannot be written: {problem.strerror or problem}")


def _lines(path: Path) -> list[str]:
    """The lines of a file that may have suffered; a byte that is no text makes a line that is no JSON."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _step(line: str) -> float:
    """The step of a line; a line that a crash cut short counts as never written."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run folder's metrics."""
    path = folder / FILE
    if not path.is_file():
        raise FileError(f"{folder} has no {FILE}; has it been trained?")
    return [json.loads(line) for line in _lines(path) if _step(line) < float("inf")]
