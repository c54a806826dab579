"""Muon (Jordan et al. 2024), an optimizer with momentum and orthogonalized updates, for the matrices inside blocks.

AdamW updates the other weights: embeddings, heads, norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from monoblock.parallel.strategy import mesh_of, split_like, whole_tensor

# Chosen for the steepest slope at zero that keeps all singular values near one.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, ns_steps: int = 5) -> Tensor:
    """Approximate the (semi-)orthogonal matrix nearest to `matrix` by quintic Newton-Schulz iterations.

    The shape is (…, M, N), one matrix or a batch of them.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = _scaled_addmm(x, _scaled_addmm(gram, gram, gram, b, c), x, a, 1.0)  # a x + (b G + c G²) x, in few kernels
    return (x.mT if is_tall else x).to(matrix.dtype)


def _scaled_addmm(base: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute beta * base + alpha * left @ right for a batch of matrices."""
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (base, left, right)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view_as(base)


class Muon(torch.optim.Optimizer):
    """Optimizer with orthogonalized Nesterov momentum; updates are scaled to the size of AdamW's (Liu et al. 2025)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for key in dict.fromkeys((tuple(weight.shape), mesh_of(weight)) for weight in weights):
                same = [weight for weight in weights if (tuple(weight.shape), mesh_of(weight)) == key]
                self._step_same_shape(same, group)

    def _step_same_shape(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update weights of equal shape together: one batched orthogonalization is faster than many small ones.

        Matrices that are split among processes are gathered first, because a part of one cannot be orthogonalized.
        """
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for weight in weights:
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        stacked = orthogonalize(torch.stack([whole_tensor(update) for update in updates]), group["ns_steps"])
        scale = 0.2 * max(stacked.shape[-2:]) ** 0.5  # the root mean square of an AdamW update is about 0.2
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        parts = [split_like(update, weight) for update, weight in zip(stacked.unbind(), weights, strict=True)]
        torch._foreach_add_(weights, parts, alpha=-group["lr"] * scale)
