"""The guard before every update: no NaN, no infinity, no sudden leap of the gradient gets into the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

REMEMBERED = ("mean", "good", "bad_in_a_row", "good_in_a_row", "gone_back")


@dataclass
class Guard:
    """Remembers how large gradients usually are; says why an update must not be made.

    `spike` times the running mean is a leap, once `settled` good updates have been seen; `patience` bad updates in a
    row call for going back to the last checkpoint.  Having gone back `retreats` times without `patience` good updates
    in a row since, it is lost: another time would be like the others.
    """

    spike: float = 10.0
    patience: int = 5
    settled: int = 100
    retreats: int = 3
    mean: float = 0.0
    good: int = 0
    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    gone_back: int = 0  # times since there was progress

    def objection(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient's norm is {grad_norm}"
        if self.spike and self.good >= self.settled and grad_norm > self.spike * self.mean:
            times = grad_norm / self.mean
            return f"the gradient's norm leapt to {grad_norm:.3g}, {times:.0f} times its usual {self.mean:.3g}"
        return None

    def passed(self, grad_norm: float) -> None:
        self.bad_in_a_row = 0
        self.good_in_a_row += 1
        if self.good_in_a_row >= self.patience:
            self.gone_back = 0
        self.good += 1
        share = max(0.02, 1 / self.good)
        self.mean += share * (grad_norm - self.mean)

    def refused(self) -> bool:
        """Count a bad update; True when there have been too many in a row."""
        self.bad_in_a_row += 1
        self.good_in_a_row = 0
        if self.bad_in_a_row < self.patience:
            return False
        self.bad_in_a_row = 0
        return True

    def went_back(self, before: int) -> None:
        """Note that, after `before` times already; good updates count from here on."""
        self.gone_back, self.good_in_a_row = before + 1, 0

    @property
    def lost(self) -> bool:
        return self.gone_back >= self.retreats

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in REMEMBERED}

    def restore(self, facts: dict[str, Any]) -> None:
        for name in REMEMBERED:
            setattr(self, name, facts[name])
