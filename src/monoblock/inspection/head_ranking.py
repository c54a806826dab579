"""Choose which heads to remove: those that matter least, as far as they can be removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from monoblock.config.model import ModelConfig
from monoblock.errors import InputError
from monoblock.inspection.importance import HeadImportance
from monoblock.inspection.pruning import attention_layers, prunable_group_size


class HeadGroup(NamedTuple):
    """Heads that share keys and values, and can be removed only together; one head where each has its own."""

    layer: str
    heads: tuple[int, ...]
    importance: float  # the sum over the heads, divided by the norm over the layer


def rank_heads(config: ModelConfig, importances: Sequence[HeadImportance], layers: str = "*") -> list[HeadGroup]:
    """Return the groups of heads that can be removed, the least important first.

    Importances are divided by their norm over each layer (Michel et al. 2019): between layers, their sizes say little.

    layers: a pattern of the names of the layers to prune, such as "encoder.*".
    """
    by_layer: dict[str, dict[int, float]] = {}
    for row in importances:
        by_layer.setdefault(row.layer, {})[row.head] = row.importance
    groups, reasons = [], []
    for layer in attention_layers(config):
        if not fnmatchcase(layer, layers) or layer not in by_layer:
            continue
        try:
            size = prunable_group_size(config, layer)
        except InputError as problem:
            reasons.append(str(problem))
            continue
        values = by_layer[layer]
        norm = sum(value**2 for value in values.values()) ** 0.5 or 1.0
        for first in range(0, len(values), size):
            heads = tuple(range(first, first + size))
            groups.append(HeadGroup(layer, heads, sum(values[head] for head in heads) / norm))
    if not groups:
        known = ", ".join(list(attention_layers(config))[:3])
        raise InputError(reasons[0] if reasons else f"no layer matches {layers!r}; write a pattern for {known}, …")
    return sorted(groups, key=lambda group: group.importance)


def choose_heads(groups: Iterable[HeadGroup], count: int) -> dict[str, list[int]]:
    """Return the heads to remove by layer: the least important groups, up to `count` heads; each layer keeps one group.

    Raise InputError if so many heads cannot be removed.
    """
    groups = list(groups)
    left: dict[str, int] = {}
    for group in groups:
        left[group.layer] = left.get(group.layer, 0) + 1
    chosen: dict[str, list[int]] = {}
    removed = 0
    for group in groups:
        if removed + len(group.heads) > count or left[group.layer] == 1:
            continue
        chosen.setdefault(group.layer, []).extend(group.heads)
        left[group.layer] -= 1
        removed += len(group.heads)
    if removed < count:
        size = len(groups[0].heads)
        most = sum(len(group.heads) for group in groups) - size * len(left)
        if count > most:
            raise InputError(
                f"each layer keeps a head, so that at most {most} can be removed, not {count}; remove fewer"
            )
        raise InputError(f"{size} heads share keys and values and are removed together; remove {removed}, not {count}")
    return {layer: sorted(heads) for layer, heads in chosen.items()}
