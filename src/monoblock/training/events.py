"""The events of a training run, and metrics.jsonl, which has a line for each step, evaluation and skipped update."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.untrusted_files import has_file, open_regular, open_to_write, reading, safe_join


@dataclass(frozen=True)
class DecisionEvent:
    """A choice made before the first step, such as the device, and the reason for it."""

    decision: str
    reason: str


@dataclass(frozen=True)
class StepEvent:
    step: int  # the number of updates so far, including this one
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # the number of target tokens so far
    seconds: float  # of this step

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvaluationEvent:
    step: int
    metrics: dict[str, float]
    is_best: bool
    is_final: bool = False  # of the finished model, on the whole validation split

    def to_dict(self) -> dict[str, Any]:
        kind = {"final": True} if self.is_final else {"best": self.is_best}
        return {"step": self.step, **self.metrics, **kind}


@dataclass(frozen=True)
class SampleEvent:
    step: int
    text: str


@dataclass(frozen=True)
class CheckpointEvent:
    step: int
    path: Path


@dataclass(frozen=True)
class SkippedUpdateEvent:
    """An update that was not applied, because its loss or gradient was rejected or its batch had no targets."""

    step: int
    reason: str
    epoch: int
    samples: list[int]

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "skipped": self.reason, "epoch": self.epoch, "samples": self.samples}


@dataclass(frozen=True)
class WarningEvent:
    """A warning for the user, such as a damaged checkpoint that was skipped, a rollback or a smaller micro-batch."""

    text: str


@dataclass(frozen=True)
class FinishedEvent:
    step: int
    interrupted: bool


TrainingEvent = (
    DecisionEvent
    | StepEvent
    | EvaluationEvent
    | SampleEvent
    | CheckpointEvent
    | SkippedUpdateEvent
    | WarningEvent
    | FinishedEvent
)


METRICS_FILE, TENSORBOARD_FOLDER = "metrics.jsonl", "tensorboard"
MAX_LINE_BYTES, MAX_NUMBER = 2**20, 2**63


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
            self.summary_writer = SummaryWriter(folder / TENSORBOARD_FOLDER)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of all steps after `step`, from which the run resumes."""
        if self.disabled or not has_file(self.path.parent, self.path.name):
            return
        kept = [raw for raw, line in _read_lines(self.path) if line["step"] <= step and not line.get("final")]
        temporary = self.path.with_suffix(".tmp")
        try:
            with open_to_write(temporary) as file:
                file.writelines(raw.rstrip(b"\n") + b"\n" for raw in kept)
            os.replace(temporary, self.path)
        except OSError as problem:
            raise self._write_error(problem) from None

    def write(self, event: TrainingEvent) -> None:
        if self.disabled or not isinstance(event, StepEvent | EvaluationEvent | SkippedUpdateEvent):
            return
        line = event.to_dict()
        try:
            if self.file is None:
                self.file = open_to_write(self.path, "append")
            self.file.write(f"{json.dumps(line)}\n".encode())
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


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of a file and its content; a line that is damaged, or that no run writes, is left out."""
    with reading(path), open_regular(safe_join(path.parent, path.name)) as file:
        while raw := file.readline(MAX_LINE_BYTES):
            line = _parse_line(raw)
            if line is not None:
                yield raw, line


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if a crash cut it short, or a key has a value that no event has."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or "step" not in line:
        return None
    samples = line.get("samples", [])
    numbers = [value for key, value in line.items() if key not in ("skipped", "samples", "best", "final")]
    is_valid = isinstance(samples, list) and isinstance(line.get("skipped", ""), str)
    is_valid = is_valid and all(type(line.get(key, False)) is bool for key in ("best", "final"))
    is_valid = is_valid and all(type(n) is int and 0 <= n < MAX_NUMBER for n in (line["step"], *samples))
    is_valid = is_valid and all(type(n) is float or (type(n) is int and abs(n) < MAX_NUMBER) for n in numbers)
    return line if is_valid else None


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in a run folder, as dicts; damaged lines are left out.

    A line has the step and either the loss, learning rate, gradient norm, tokens and seconds of a training step, or the
    metrics of a validation, such as "val_loss". The last line of a finished run has its final metrics and "final".
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise FileError(f"{folder} has no {METRICS_FILE}; give the folder of a training run")
    return [line for _, line in _read_lines(path)]
