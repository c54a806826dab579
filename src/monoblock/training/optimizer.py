"""Adam, AdamW and Muon over groups: matrices decay, norms, biases and embeddings do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import ConfigError, did_you_mean
from monoblock.training.muon import Muon

KINDS = ("adam", "adamw", "muon")


def is_table(name: str, weight: Tensor) -> bool:
    """Whether a weight is looked up by row: tokens, places, segments."""
    names = name in ("input.weight", "target.weight") or any(part in name for part in ("token", "position", "segment"))
    return weight.dim() >= 2 and names


def decays(name: str, weight: Tensor) -> bool:
    """Whether a weight is decayed: matrices inside blocks and heads, not tables, norms or biases."""
    return weight.dim() >= 2 and not is_table(name, weight) and not name.endswith("bias")  # experts have 2-axis biases


def in_a_block(name: str, weight: Tensor) -> bool:
    """Whether Muon takes it: a matrix of attention or feed-forward, of one network or of many experts."""
    return (
        weight.dim() >= 2
        and any(part in name for part in (".attention.", ".cross.", ".feedforward."))
        and not (name.endswith("bias") or "position_bias" in name or "router" in name)
    )


class Optimizers:
    """One or several torch optimizers driven as one."""

    def __init__(self, each: list[torch.optim.Optimizer]) -> None:
        self.each = each
        for optimizer in each:
            for group in optimizer.param_groups:
                group.setdefault("factor", 1.0)

    def set_rate(self, rate: float) -> None:
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none=True)


def build(
    model: nn.Module,
    kind: str = "adamw",
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    table_decay: float = 0.0,
    momentum: float = 0.95,
    adam_factor: float = 1.0,
) -> Optimizers:
    """Optimizers for a model; the rate is set before each step.

    `adam_factor` multiplies the rate of what AdamW keeps beside Muon.
    """
    if kind not in KINDS:
        raise ConfigError(f"optimizer={kind!r} is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [(n, w) for n, w in named if kind == "muon" and in_a_block(n, w)]
    taken = {name for name, _ in matrices}
    rest = [(n, w) for n, w in named if n not in taken]
    factor = adam_factor if kind == "muon" else 1.0
    each: list[torch.optim.Optimizer] = []
    if matrices:
        each.append(Muon([w for _, w in matrices], momentum=momentum, weight_decay=weight_decay))
    if rest:
        groups = _groups(rest, weight_decay, table_decay, factor)
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps, "fused": True}
        each.append(torch.optim.Adam(groups, **options) if kind == "adam" else torch.optim.AdamW(groups, **options))
    return Optimizers(each)


def _groups(
    named: list[tuple[str, nn.Parameter]], weight_decay: float, table_decay: float, factor: float
) -> list[dict[str, Any]]:
    decayed = [w for n, w in named if decays(n, w)]
    tables = [w for n, w in named if table_decay and is_table(n, w)]
    taken = {id(w) for w in decayed + tables}
    kept = [w for _, w in named if id(w) not in taken]
    groups = [(decayed, weight_decay), (tables, table_decay), (kept, 0.0)]
    return [{"params": ws, "weight_decay": decay, "factor": factor} for ws, decay in groups if ws]
