"""Reject updates whose loss or gradient is not finite, or whose gradient norm is far above the usual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

STATE_FIELDS = ("mean", "good", "bad_in_a_row", "good_in_a_row", "gone_back")


@dataclass
class UpdateGuard:
    """Track the usual gradient norm and decide whether to apply an update.

    An update is rejected if its norm is more than `spike` times the running mean, but only after `min_good_updates`
    updates. After `patience` rejected updates in a row, the trainer rolls back to the last good checkpoint. After
    `max_rollbacks` rollbacks without `patience` good updates in a row between them, the run ends.
    """

    MIN_WEIGHT: ClassVar[float] = 0.02  # of the newest norm in the running mean

    spike: float = 10.0
    patience: int = 5
    min_good_updates: int = 100
    max_rollbacks: int = 3
    mean: float = 0.0
    good: int = 0
    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    gone_back: int = 0  # rollbacks since there were `patience` good updates in a row

    def rejection_reason(self, loss: float, grad_norm: float) -> str | None:
        """Return why an update must not be applied, or None if it may be applied."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self.spike and self.good >= self.min_good_updates and grad_norm > self.spike * self.mean:
            ratio = grad_norm / self.mean if self.mean else math.inf
            return f"the gradient norm jumped to {grad_norm:.3g}, {ratio:.0f} times its mean {self.mean:.3g}"
        return None

    def record_good_update(self, grad_norm: float) -> None:
        self.bad_in_a_row = 0
        self.good_in_a_row += 1
        if self.good_in_a_row >= self.patience:
            self.gone_back = 0
        self.good += 1
        # At first a plain mean, later an exponential one.
        self.mean += max(self.MIN_WEIGHT, 1 / self.good) * (grad_norm - self.mean)

    def record_bad_update(self) -> bool:
        """Count a rejected update; return whether to roll back, because `patience` updates in a row were rejected."""
        self.bad_in_a_row += 1
        self.good_in_a_row = 0
        if self.bad_in_a_row < self.patience:
            return False
        self.bad_in_a_row = 0
        return True

    def record_rollback(self, previous_rollbacks: int) -> None:
        """Set the number of rollbacks to previous_rollbacks + 1; restoring the checkpoint has reset it."""
        self.gone_back, self.good_in_a_row = previous_rollbacks + 1, 0

    @property
    def is_exhausted(self) -> bool:
        return self.gone_back >= self.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE_FIELDS:
            setattr(self, name, state[name])
