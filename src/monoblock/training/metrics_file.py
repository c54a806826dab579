"""Write metrics.jsonl, which has one line for each step, evaluation and skipped update; optionally also TensorBoard."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.training.events import EvaluationEvent, SkippedUpdateEvent, StepEvent, TrainingEvent

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Append events to metrics.jsonl in a run folder, and optionally to TensorBoard; if `disabled`, write nothing."""

    def __init__(self, folder: Path, *, tensorboard: bool = False, disabled: bool = False) -> None:
        self.path, self.disabled = folder / METRICS_FILE, disabled
        self.file: Any = None
        self.summary_writer: Any = None
        if tensorboard and not disabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise FileError("--tensorboard needs the package tensorboard; pip install 'monoblock[track]'") from None
            self.summary_writer = SummaryWriter(folder / "tensorboard")

    def truncate_after(self, step: int) -> None:
        """Remove the lines of all steps after `step`, from which the run resumes."""
        if self.disabled or not self.path.exists():
            return
        kept = [line for line in _read_lines(self.path) if _parse_step(line) <= step]
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as problem:
            raise self._write_error(problem) from None

    def write(self, event: TrainingEvent) -> None:
        if self.disabled or not isinstance(event, StepEvent | EvaluationEvent | SkippedUpdateEvent):
            return
        line = event.to_dict()
        try:
            if self.file is None:
                self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (kept open for the run)
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as problem:
            raise self._write_error(problem) from None
        if self.summary_writer is not None:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self.summary_writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        for writer in (self.file, self.summary_writer):
            if writer is not None:
                with suppress(OSError):  # a failed write has already been reported
                    writer.close()

    def _write_error(self, problem: OSError) -> FileError:
        return FileError(f"{self.path} cannot be written: {problem.strerror or problem}")


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a file that may be damaged; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _parse_step(line: str) -> float:
    """Return the step of a line, or infinity if a crash cut the line short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in a run folder, as dicts; damaged lines are left out.

    A line has the step and either the loss, learning rate, gradient norm, tokens and seconds of a training step, or the
    metrics of a validation, such as "val_loss".
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise FileError(f"{folder} has no {METRICS_FILE}; give the folder of a training run")
    return [json.loads(line) for line in _read_lines(path) if _parse_step(line) < float("inf")]
