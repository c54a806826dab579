"""The events of a training run, which the trainer yields and the command line displays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
