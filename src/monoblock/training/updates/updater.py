"""Apply the update of each step, or reject it, and report its loss and gradient norm.

A GPU that waits for Python between two steps is idle.  So on a single GPU the guard decides on the device whether an
update is applied (`DeviceGuard`).  Python reads loss and norm while the next step runs, decides the same, and reports
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monoblock.training.collate import TensorBatch
from monoblock.training.optimizer import Optimizers
from monoblock.training.updates.device_guard import DeviceGuard, can_defer
from monoblock.training.updates.update_guard import UpdateGuard
from monoblock.training.weight_averaging import ExponentialMovingAverage

NO_TARGETS = "the batch has no targets"


@dataclass
class Update:
    """One step: what its events report.  Loss and gradient norm may still be on their way from the GPU."""

    step: int
    tokens: int
    lr: float
    start: float
    batch: TensorBatch
    has_targets: bool
    loss: float | Tensor
    grad_norm: float | Tensor
    _arrival: torch.cuda.Event | None = field(default=None, repr=False)

    def send_to_host(self) -> None:
        """Start to copy loss and gradient norm from a GPU, without waiting."""
        assert isinstance(self.loss, Tensor)
        assert isinstance(self.grad_norm, Tensor)
        if self.loss.is_cuda:
            numbers = torch.empty(2, dtype=torch.float64, pin_memory=True)
            numbers.copy_(torch.stack((self.loss.double(), self.grad_norm.double())), non_blocking=True)
            self.loss, self.grad_norm = numbers
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> tuple[float, float]:
        """Return loss and gradient norm; wait until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self.loss, self.grad_norm = float(self.loss), float(self.grad_norm)
        return self.loss, self.grad_norm


class FinishedUpdate(NamedTuple):
    """A step whose loss and gradient norm are known; `reason` says why its update was rejected, or is None."""

    update: Update
    loss: float
    grad_norm: float
    reason: str | None
    seconds: float
    is_fp16_overflow: bool


class Updater:
    """Run the optimizers of a training run, guarded by an `UpdateGuard`.

    can_wait: whether to read loss and gradient norm one step later, where the optimizers allow it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        guard: UpdateGuard,
        scaler: torch.amp.GradScaler,
        average: ExponentialMovingAverage | None = None,
        *,
        can_wait: bool = False,
    ) -> None:
        self.model, self.optimizers, self.guard, self.scaler, self.average = model, optimizers, guard, scaler, average
        is_deferred = can_wait and not scaler.is_enabled() and can_defer(optimizers)
        self.device_guard = DeviceGuard(guard) if is_deferred else None
        self.unread: Update | None = None  # the last step, if its loss is still on the device
        self.last_end = 0.0  # when the last step was reported

    def run(self, update: Update) -> Iterator[FinishedUpdate]:
        """Apply the update of a step, unless it is rejected; yield the steps that are finished by then."""
        self.optimizers.set_lr(update.lr)
        if self.device_guard is None or not update.has_targets:
            yield from self.finish()
            yield self._finish(update, is_applied=False)
            return
        assert isinstance(update.loss, Tensor)
        assert isinstance(update.grad_norm, Tensor)
        is_good = self.device_guard.apply_unless_bad(self.optimizers, update.loss, update.grad_norm)
        if self.average is not None:
            self.average.update_if(is_good, self.model)
        self.optimizers.zero_grad()
        update.send_to_host()
        previous, self.unread = self.unread, update
        if previous is not None:
            yield self._finish(previous, is_applied=True)

    def finish(self) -> Iterator[FinishedUpdate]:
        """Yield the last step, if it is not finished."""
        if self.unread is not None:
            update, self.unread = self.unread, None
            yield self._finish(update, is_applied=True)

    def discard(self) -> None:
        """Forget the last step and what the device knows of the guard, because weights and guard were replaced."""
        self.unread = None
        if self.device_guard is not None:
            self.device_guard.reset()

    def _finish(self, update: Update, *, is_applied: bool) -> FinishedUpdate:
        loss, grad_norm = update.read()
        reason = self.guard.rejection_reason(loss, grad_norm) if update.has_targets else NO_TARGETS
        if not is_applied:
            self._apply_unless(reason)
        overflows = self.is_fp16_overflow(loss, grad_norm)
        if reason is None:
            self.guard.record_good_update(grad_norm)
        now, start = time.perf_counter(), max(update.start, self.last_end)
        self.last_end = now
        return FinishedUpdate(update, loss, grad_norm, reason, now - start, overflows)

    def is_fp16_overflow(self, loss: float, grad_norm: float) -> bool:
        """Return whether only the loss scale is too large for fp16, so that the gradient overflowed."""
        is_scaled = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        return is_scaled and math.isfinite(loss) and not math.isfinite(grad_norm)

    def _apply_unless(self, reason: str | None) -> None:
        if reason is None:
            for optimizer in self.optimizers.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            if self.average is not None:
                self.average.update(self.model)
        elif self.scaler.is_enabled():
            self.scaler.update()  # halves the scale if a gradient is not finite
        self.optimizers.zero_grad()
