"""Adam, AdamW and Muon over groups: matrices decay, norms, biases and embeddings do not; lower layers may go slower."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


BLOCK = re.compile(r"(encoder|decoder)\.(\d+)\.")


def layers_above(names: Iterable[str]) -> dict[str, int]:
    """How many layers lie between each weight and the output: none above the head, all of them above an embedding."""
    found = {name: BLOCK.match(name) for name in names}
    depth: dict[str, int] = {}
    for match in found.values():
        if match:
            depth[match[1]] = max(depth.get(match[1], 0), int(match[2]) + 1)

    def above(name: str) -> int:
        match = found[name]
        if match:
            return depth[match[1]] - int(match[2])
        return 1 + max(depth.values(), default=0) if name.startswith(("input.", "target.")) else 0

    return {name: above(name) for name in found}


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
    layer_decay: float = 1.0,
) -> Optimizers:
    """Optimizers for a model; the rate is set before each step.

    `adam_factor` multiplies the rate of what AdamW keeps beside Muon; `layer_decay` that of each layer once more for
    every layer above it (Howard and Ruder 2018).
    """
    if kind not in KINDS:
        raise ConfigError(f"optimizer={kind!r} is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [(n, w) for n, w in named if kind == "muon" and in_a_block(n, w)]
    taken = {name for name, _ in matrices}
    rest = [(n, w) for n, w in named if n not in taken]
    above = layers_above(name for name, _ in model.named_parameters())
    slower = {name: layer_decay**count for name, count in above.items()} if layer_decay != 1.0 else {}
    each: list[torch.optim.Optimizer] = []
    if matrices:
        each.append(Muon(_by_rate(matrices, weight_decay, slower), momentum=momentum))
    if rest:
        groups = _groups(rest, weight_decay, table_decay, adam_factor if kind == "muon" else 1.0, slower)
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps, "fused": True}
        each.append(torch.optim.Adam(groups, **options) if kind == "adam" else torch.optim.AdamW(groups, **options))
    return Optimizers(each)


Named = list[tuple[str, nn.Parameter]]


def _groups(
    named: Named, weight_decay: float, table_decay: float, factor: float, slower: dict[str, float]
) -> list[dict[str, Any]]:
    decayed = [(n, w) for n, w in named if decays(n, w)]
    tables = [(n, w) for n, w in named if table_decay and is_table(n, w)]
    taken = {id(w) for _, w in decayed + tables}
    kept = [(n, w) for n, w in named if id(w) not in taken]
    parts = [(decayed, weight_decay), (tables, table_decay), (kept, 0.0)]
    return [group for some, decay in parts if some for group in _by_rate(some, decay, slower, factor)]


def _by_rate(named: Named, decay: float, slower: dict[str, float], factor: float = 1.0) -> list[dict[str, Any]]:
    """One group for every share of the rate."""
    rates: dict[float, list[nn.Parameter]] = {}
    for name, weight in named:
        rates.setdefault(factor * slower.get(name, 1.0), []).append(weight)
    return [{"params": weights, "weight_decay": decay, "factor": rate} for rate, weights in rates.items()]
