"""What a training run tells while it goes: the loop yields these, the command line draws them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Chosen:
    """What was decided before the first step, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Stepped:
    step: int  # updates done, this one included
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # asked places so far
    seconds: float  # of this step

    def line(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluated:
    step: int
    metrics: dict[str, float]
    best: bool

    def line(self) -> dict[str, Any]:
        return {"step": self.step, **self.metrics, "best": self.best}


@dataclass(frozen=True)
class Sampled:
    step: int
    text: str


@dataclass(frozen=True)
class Saved:
    step: int
    place: Path


@dataclass(frozen=True)
class Skipped:
    """An update that was not made, because it would have done harm."""

    step: int
    reason: str
    epoch: int
    samples: list[int]

    def line(self) -> dict[str, Any]:
        return {"step": self.step, "skipped": self.reason, "epoch": self.epoch, "samples": self.samples}


@dataclass(frozen=True)
class Warned:
    """Something the user must know: a damaged checkpoint passed over, a roll-back, a smaller micro-batch."""

    text: str


@dataclass(frozen=True)
class Finished:
    step: int
    interrupted: bool


Event = Chosen | Stepped | Evaluated | Sampled | Saved | Skipped | Warned | Finished
