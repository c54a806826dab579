"""Adam, AdamW, Muon and SGD with parameter groups: weight decay for matrices only, learning rates by layer.

Muon (Jordan et al. 2024) orthogonalizes the updates of matrices inside blocks. AdamW then updates the other weights:
embeddings, heads, norms and biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import ConfigError, did_you_mean
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


# What builds the optimizer of parameter groups from beta1 and beta2, and epsilon; accounting/memory.py lists the names.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], tuple[float, float], float], torch.optim.Optimizer]] = {
    "adam": lambda groups, betas, eps: torch.optim.Adam(groups, lr=0.0, betas=betas, eps=eps, fused=True),
    "adamw": lambda groups, betas, eps: torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True),
    "sgd": lambda groups, betas, eps: torch.optim.SGD(groups, lr=0.0, fused=True),
}
OPTIMIZERS["muon"] = OPTIMIZERS["adamw"]  # of the other weights


def is_embedding_table(name: str, weight: Tensor) -> bool:
    """Return whether a weight is an embedding table, of tokens, positions or segments."""
    is_table = name in ("input.weight", "target.weight") or any(
        word in name for word in ("token", "position", "segment")
    )
    return weight.dim() >= 2 and is_table


def has_weight_decay(name: str, weight: Tensor) -> bool:
    """Return whether weight decay applies to a weight.

    It applies to matrices in blocks and heads, but not to embedding tables, norms and biases.
    """
    is_bias = name.endswith("bias")  # biases of experts have two dimensions
    return weight.dim() >= 2 and not is_embedding_table(name, weight) and not is_bias


def is_block_matrix(name: str, weight: Tensor) -> bool:
    """Return whether Muon updates a weight, a matrix of attention, of a feed-forward network or of an expert."""
    return (
        weight.dim() >= 2
        and any(part in name for part in (".attention.", ".cross.", ".feedforward."))
        and not (name.endswith("bias") or "position_bias" in name or "router" in name)
    )


NamedParameters = list[tuple[str, nn.Parameter]]
BLOCK_PREFIX = re.compile(r"(encoder|decoder)\.(\d+)\.")


def count_layers_above(names: Iterable[str]) -> dict[str, int]:
    """Return a dict from names of weights to how many layers they are away from the output.

    The number is 0 for the head, 1 for the last block, and highest for the embeddings.
    """
    matches = {name: BLOCK_PREFIX.match(name) for name in names}
    depth: dict[str, int] = {}
    for match in matches.values():
        if match:
            depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)

    def count(name: str) -> int:
        match = matches[name]
        if match:
            return depth[match[1]] - int(match[2])
        return 1 + max(depth.values(), default=0) if name.startswith(("input.", "target.")) else 0

    return {name: count(name) for name in matches}


class Optimizers:
    """One or more torch optimizers that are used like a single one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("factor", 1.0)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def build_optimizers(
    model: nn.Module,
    kind: str = "adamw",
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    table_decay: float = 0.0,
    momentum: float = 0.95,
    adam_factor: float = 1.0,
    layer_decay: float = 1.0,
    other_names: Iterable[str] = (),
) -> Optimizers:
    """Build the optimizers of a model; call `set_lr` before each step to set the learning rate.

    SGD has no momentum. `table_decay` is the weight decay of embedding tables. With Muon, `adam_factor` scales the
    learning rate of the weights that AdamW updates. The learning rate of a weight is multiplied by layer_decay^n, where
    n is the number of layers that `count_layers_above` returns for it (Howard and Ruder 2018); `other_names` are the
    names of weights in layers that other processes have.
    """
    if kind not in OPTIMIZERS:
        raise ConfigError(f"optimizer={kind!r} is not one of {', '.join(OPTIMIZERS)}{did_you_mean(kind, OPTIMIZERS)}")
    trainable = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [(name, weight) for name, weight in trainable if kind == "muon" and is_block_matrix(name, weight)]
    matrix_names = {name for name, _ in matrices}
    rest = [(name, weight) for name, weight in trainable if name not in matrix_names]
    layers_above = count_layers_above([*(name for name, _ in model.named_parameters()), *other_names])
    lr_scales = {name: layer_decay**count for name, count in layers_above.items()} if layer_decay != 1.0 else {}
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(_group_by_lr(matrices, weight_decay, lr_scales), momentum=momentum))
    if rest:
        parts: tuple[NamedParameters, NamedParameters, NamedParameters] = ([], [], [])  # matrices, tables, the rest
        for name, weight in rest:
            is_table = bool(table_decay) and is_embedding_table(name, weight)
            parts[0 if has_weight_decay(name, weight) else 1 if is_table else 2].append((name, weight))
        decays = zip(parts, (weight_decay, table_decay, 0.0), strict=True)
        factor = adam_factor if kind == "muon" else 1.0
        groups = [group for named, decay in decays for group in _group_by_lr(named, decay, lr_scales, factor)]
        optimizers.append(OPTIMIZERS[kind](groups, betas, eps))
    return Optimizers(optimizers)


def _group_by_lr(
    named: NamedParameters, decay: float, lr_scales: dict[str, float], factor: float = 1.0
) -> list[dict[str, Any]]:
    """Build parameter groups, one for each distinct factor on the learning rate, which is factor × lr_scales[name].

    Weights that are split among different processes cannot be in the same group.
    """
    groups: dict[tuple[float, object], list[nn.Parameter]] = {}
    for name, weight in named:
        groups.setdefault((factor * lr_scales.get(name, 1.0), mesh_of(weight)), []).append(weight)
    return [{"params": weights, "weight_decay": decay, "factor": scale} for (scale, _), weights in groups.items()]
