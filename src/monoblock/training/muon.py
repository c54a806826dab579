"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal before they are applied.

For the matrices inside blocks; everything else (embeddings, heads, norms, biases) is left to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero while no singular value leaves the range around one


def orthogonalize(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices to (…, m, n), by Newton-Schulz iteration of degree five."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = _added(x, _added(gram, gram, gram, b, c), x, a, 1.0)  # a x + (b G + c G²) x, in few kernels
    return (x.mT if tall else x).to(matrix.dtype)


def _added(to: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """beta to + alpha left @ right, of matrices (…, m, n)."""
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (to, left, right)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view_as(to)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled so that an update has the size AdamW's would have (Liu et al. 2025)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        rounds: int = 5,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rounds": rounds})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shape in {tuple(p.shape) for p in group["params"] if p.grad is not None}:
                same = [p for p in group["params"] if p.grad is not None and tuple(p.shape) == shape]
                self._step(same, group)

    def _step(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """All weights of one shape at once: one batched iteration instead of many small ones."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for weight in weights:
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        stacked = orthogonalize(torch.stack(updates), group["rounds"])
        size = 0.2 * max(stacked.shape[-2:]) ** 0.5  # the root mean square of an AdamW update is about 0.2
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, stacked.unbind(), alpha=-group["lr"] * size)
