"""The guard before every update: no NaN, no infinity, no sudden leap of the gradient gets into the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Guard:
    """Remembers how large gradients usually are; says why an update must not be made.

    `spike` times the running mean is a leap, once `settled` good updates have been seen; `patience` bad updates in a
    row call for going back to the last checkpoint.
    """

    spike: float = 10.0
    patience: int = 5
    settled: int = 100
    mean: float = 0.0
    good: int = 0
    bad_in_a_row: int = field(default=0)

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
        self.good += 1
        share = max(0.02, 1 / self.good)
        self.mean += share * (grad_norm - self.mean)

    def refused(self) -> bool:
        """Count a bad update; True when there have been too many in a row."""
        self.bad_in_a_row += 1
        if self.bad_in_a_row < self.patience:
            return False
        self.bad_in_a_row = 0
        return True

    def facts(self) -> dict[str, Any]:
        return {"mean": self.mean, "good": self.good, "bad_in_a_row": self.bad_in_a_row}

    def restore(self, facts: dict[str, Any]) -> None:
        self.mean, self.good, self.bad_in_a_row = facts["mean"], facts["good"], facts["bad_in_a_row"]
