"""Decide on the device whether an update is applied, as an `UpdateGuard` does on the host.

The optimizer kernel does nothing if `found_inf` is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.training.optimizer import Optimizers
from monoblock.training.updates.update_guard import UpdateGuard


def can_defer(optimizers: Optimizers) -> bool:
    """Return whether every optimizer can leave out an update on the device, as torch's fused ones can."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return all(type(optimizer) in kinds and optimizer.defaults.get("fused") for optimizer in optimizers.optimizers)


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
