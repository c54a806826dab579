"""Guard the update of each step: apply it, or reject it, and report its loss and gradient norm.

An update is rejected if its loss or gradient is not finite, or if its gradient norm is far above the usual.  A GPU that
waits for Python between two steps is idle, so where it can, `DeviceGuard` decides this on the device, and Python reads
loss and norm while the next step runs, decides the same, and reports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from monoblock.training.collate import TensorBatch
from monoblock.training.optimizer import Optimizers
from monoblock.training.weight_averaging import ExponentialMovingAverage

DEFERRABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # whose fused kernels can leave out an update
STATE_FIELDS = ("mean", "good", "bad_in_a_row", "good_in_a_row", "rollbacks")


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
    rollbacks: int = 0  # since there were `patience` good updates in a row

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
            self.rollbacks = 0
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
        self.rollbacks, self.good_in_a_row = previous_rollbacks + 1, 0

    @property
    def is_exhausted(self) -> bool:
        return self.rollbacks >= self.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE_FIELDS:
            setattr(self, name, state[name])


class DeviceGuard:
    """The decisions of an `UpdateGuard`, computed on the device in the same arithmetic."""

    def __init__(self, guard: UpdateGuard) -> None:
        self.guard = guard
        self._mean: Tensor | None = None
        self._good: Tensor | None = None

    def reset(self) -> None:
        """Take mean and counter from the host again, before the next update."""
        self._mean = self._good = None

    def apply_unless_bad(self, optimizers: Optimizers, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Run the optimizers, unless the guard rejects the update; return whether they ran, a bool on the device."""
        guard, norm = self.guard, grad_norm.double()
        if self._mean is None or self._good is None:
            self._mean = torch.tensor(guard.mean, dtype=torch.float64, device=norm.device)
            self._good = torch.tensor(guard.good, dtype=torch.float64, device=norm.device)
        is_good = loss.isfinite() & norm.isfinite()
        if guard.spike:
            is_good &= (self._good < guard.min_good_updates) | (norm <= guard.spike * self._mean)
        for optimizer in optimizers.optimizers:
            optimizer.found_inf = (~is_good).float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        good = self._good + 1
        mean = self._mean + (1 / good).clamp(min=guard.MIN_WEIGHT) * (norm - self._mean)
        self._good, self._mean = torch.where(is_good, good, self._good), torch.where(is_good, mean, self._mean)
        return is_good


NO_TARGETS = "the batch has no targets"


@dataclass
class Update:
    """One step: what its events report. Loss and gradient norm may still be on their way from the GPU."""

    step: int
    tokens: int
    lr: float
    start: float
    batch: TensorBatch
    has_targets: bool
    loss: float | Tensor
    grad_norm: float | Tensor
    reason: str | None = None  # why it was rejected
    seconds: float = 0.0
    is_fp16_overflow: bool = False
    is_decided: bool = True  # whether Python knows if it was rejected
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

    def wait(self) -> tuple[float, float]:
        """Return loss and gradient norm; wait until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self.loss, self.grad_norm = float(self.loss), float(self.grad_norm)
        return self.loss, self.grad_norm


class Updater:
    """Run the optimizers of a training run, guarded by an `UpdateGuard`.

    can_wait: whether loss and gradient norm are read one step later, where the optimizers allow it.
    sum_losses: a function that sums the losses of several steps over the processes of the run.
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
        sum_losses: Callable[..., list[float]] = lambda *losses: list(losses),
    ) -> None:
        self.model, self.optimizers, self.guard, self.scaler, self.average = model, optimizers, guard, scaler, average
        fused = [type(one) in DEFERRABLE and one.defaults.get("fused") for one in optimizers.optimizers]
        is_deferred = can_wait and not scaler.is_enabled() and all(fused)
        self.device_guard = DeviceGuard(guard) if is_deferred else None
        self.lag = int(is_deferred)  # how many steps are read later, while the next one runs
        self.sum_losses = sum_losses
        self.unread: list[Update] = []  # the steps that were not reported yet
        self.last_end = 0.0  # when the last step was reported

    def run(self, update: Update) -> None:
        """Apply the update of a step, unless it is rejected."""
        self.optimizers.set_lr(update.lr)
        if self.device_guard is None or not update.has_targets:
            self._decide(update)
            if update.reason is None:
                for optimizer in self.optimizers.optimizers:
                    self.scaler.step(optimizer)
            if update.reason is None or self.scaler.is_enabled():
                self.scaler.update()  # halves the scale if a gradient is not finite
            if update.reason is None and self.average is not None:
                self.average.update(self.model)
            update.is_fp16_overflow = self.is_fp16_overflow(*update.wait())
        else:
            assert isinstance(update.loss, Tensor)
            assert isinstance(update.grad_norm, Tensor)
            is_good = self.device_guard.apply_unless_bad(self.optimizers, update.loss, update.grad_norm)
            if self.average is not None:
                self.average.update_if(is_good, self.model)
            update.is_decided = False
            update.send_to_host()
        self.optimizers.zero_grad()
        self.unread.append(update)

    def read(self, keep: int = 0) -> Iterator[Update]:
        """Yield the steps that were not reported yet, but the last `keep`, with their losses and gradient norms."""
        count = len(self.unread) - keep
        updates, self.unread = self.unread[: max(count, 0)], self.unread[max(count, 0) :]
        if not updates:
            return
        losses = self.sum_losses(*(update.wait()[0] for update in updates))
        now, start = time.perf_counter(), max(updates[0].start, self.last_end)
        self.last_end = now
        for update, loss in zip(updates, losses, strict=True):
            update.loss, update.seconds = loss, (now - start) / len(updates)
            update.is_fp16_overflow &= math.isfinite(loss)  # in all processes
            if not update.is_decided:
                self._decide(update)
            elif update.reason not in (None, NO_TARGETS) and not math.isfinite(loss):
                update.reason = self.guard.rejection_reason(*update.wait())
            yield update

    def discard(self) -> None:
        """Forget unread steps and what the device knows of the guard, because weights and guard were replaced."""
        self.unread = []
        if self.device_guard is not None:
            self.device_guard.reset()

    def _decide(self, update: Update) -> None:
        """Ask the guard whether to apply an update; a good one changes the usual norm."""
        loss, grad_norm = update.wait()
        update.reason = self.guard.rejection_reason(loss, grad_norm) if update.has_targets else NO_TARGETS
        if update.reason is None:
            self.guard.record_good_update(grad_norm)

    def is_fp16_overflow(self, loss: float, grad_norm: float) -> bool:
        """Return whether only the loss scale is too large for fp16, so that the gradient overflowed."""
        is_scaled = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        return is_scaled and math.isfinite(loss) and not math.isfinite(grad_norm)
