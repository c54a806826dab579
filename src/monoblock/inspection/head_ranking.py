"""Choose which heads to remove: those that matter least, as far as they can be removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
    importance: float  # the sum over the heads; divided by the norm over the layer, if `rank_heads` normalizes


def prunable_layers(config: ModelConfig, layers: str = "*") -> dict[str, int]:
    """Return how many heads of each layer can be removed only together, for the layers that can be pruned.

    Raise InputError if there is none.

    layers: a pattern of the names of the layers to prune, such as "encoder.*".
    """
    sizes, reasons = {}, []
    for layer in attention_layers(config):
        if fnmatchcase(layer, layers):
            try:
                sizes[layer] = prunable_group_size(config, layer)
            except InputError as problem:
                reasons.append(str(problem))
    if not sizes:
        known = ", ".join(list(attention_layers(config))[:3])
        raise InputError(reasons[0] if reasons else f"no layer matches {layers!r}; write a pattern for {known}, …")
    return sizes


def list_groups(config: ModelConfig, layers: str = "*") -> list[HeadGroup]:
    """Return the groups of heads that can be removed, the largest first; their importance is 0."""
    sizes, attention = prunable_layers(config, layers), attention_layers(config)
    rows = [HeadImportance(layer, head, 0.0) for layer in sizes for head in range(attention[layer].heads)]
    return sorted(rank_heads(sizes, rows), key=lambda group: -len(group.heads))


def rank_heads(
    sizes: Mapping[str, int], importances: Iterable[HeadImportance], *, normalize: bool = True
) -> list[HeadGroup]:
    """Return the groups of heads that can be removed, the least important first.

    sizes: the number of heads in a group of each layer, from `prunable_layers`; other layers are left out.
    importances: of all heads of a layer, in the order of the heads.
    normalize: divide importances by their norm over each layer, as Michel et al. (2019) do for importances by
        gradient.  A change of the loss, which ablation measures, can be compared between layers as it is.
    """
    by_layer: dict[str, list[HeadImportance]] = {}
    for row in importances:
        by_layer.setdefault(row.layer, []).append(row)
    groups = []
    for layer, rows in by_layer.items():
        if layer not in sizes:
            continue
        norm = (sum(row.importance**2 for row in rows) ** 0.5 or 1.0) if normalize else 1.0
        for first in range(0, len(rows), sizes[layer]):
            members = rows[first : first + sizes[layer]]
            heads = tuple(row.head for row in members)
            groups.append(HeadGroup(layer, heads, sum(row.importance for row in members) / norm))
    return sorted(groups, key=lambda group: group.importance)


def choose_heads(groups: Iterable[HeadGroup], count: int, *, exact: bool = True) -> dict[str, list[int]]:
    """Return the heads to remove by layer: the least important groups, up to `count` heads; each layer keeps one group.

    exact: raise InputError if `count` heads cannot be removed; otherwise return fewer.
    """
    groups = list(groups)
    left = Counter(group.layer for group in groups)
    chosen: dict[str, list[int]] = {}
    removed = 0
    for group in groups:
        if removed + len(group.heads) > count or left[group.layer] == 1:
            continue
        chosen.setdefault(group.layer, []).extend(group.heads)
        left[group.layer] -= 1
        removed += len(group.heads)
    if removed < count and exact:
        raise InputError(_explain_shortage(groups, count, removed))
    return {layer: sorted(heads) for layer, heads in chosen.items()}


def _explain_shortage(groups: list[HeadGroup], count: int, removed: int) -> str:
    last = {group.layer: len(group.heads) for group in groups}  # a group of each layer is kept
    most = sum(len(group.heads) for group in groups) - sum(last.values())
    if count > most:
        return f"each layer keeps a head, so that at most {most} can be removed, not {count}; remove fewer"
    size = max(last.values())
    return f"{size} heads share keys and values and are removed together; remove {removed}, not {count}"
