"""Remove the least important heads in several rounds, and measure importance anew after each.

Of two heads that do the same, each alone seems unimportant; once one of them is removed, the other is needed.  One
ranking for all heads removes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from monoblock.errors import InputError
from monoblock.inspection.head_ranking import HeadGroup, choose_heads, list_groups, prunable_layers, rank_heads
from monoblock.inspection.importance import BatchLoss, HeadImportance, ImportanceMethod, head_importance
from monoblock.inspection.pruning import attention_layers, prune_heads
from monoblock.nn.transformer import Transformer

MAX_DEFAULT_ROUNDS = 16

T = TypeVar("T", bound=Transformer)


class PrunedHeads(NamedTuple, Generic[T]):
    """A pruned model and what was removed; heads have the numbers of the original model."""

    model: T
    removed: dict[str, list[int]]  # heads by layer
    ranking: list[HeadGroup]  # removed groups in the order of removal, then the others, the least important first
    num_rounds: int


def prune_in_rounds(
    model: T,
    batches: Iterable[Any],
    loss: BatchLoss,
    count: int,
    *,
    rounds: int | None = None,
    layers: str = "*",
    method: ImportanceMethod = "gradient",
    progress: Callable[[int], None] = lambda count: None,
) -> PrunedHeads[T]:
    """Remove the `count` heads that matter least for the loss on the batches.

    rounds: how often importance is measured.  None removes one group of heads in each round, or more in each of
        MAX_DEFAULT_ROUNDS rounds; 1 ranks all heads once, on the original model.
    layers: a pattern of the layers to prune, such as "encoder.*".
    """
    sizes, batches = prunable_layers(model.config, layers), list(batches)
    choose_heads(list_groups(model.config, layers), count)  # refuse an impossible count before measuring anything
    targets = _removed_after_rounds(count, rounds, max(sizes.values()))
    names = [f"{layer}.heads" for layer in sizes]
    smaller, removed = model, dict[str, list[int]]()
    history: list[HeadGroup] = []
    kept: list[HeadGroup] = []
    for target in targets:
        measured = head_importance(smaller, batches, loss, method=method, names=names, progress=progress)
        kept = rank_heads(sizes, _number_as_in(model, removed, measured), normalize=method == "gradient")
        chosen = choose_heads(kept, target - sum(map(len, removed.values())), exact=target == count)
        removed = {layer: sorted([*removed.get(layer, ()), *chosen.get(layer, ())]) for layer in {**removed, **chosen}}
        history += [group for group in kept if group.heads[0] in removed.get(group.layer, ())]
        smaller = prune_heads(model, removed)
    kept = [group for group in kept if group.heads[0] not in removed.get(group.layer, ())]
    return PrunedHeads(smaller, removed, history + kept, len(targets))


def _removed_after_rounds(count: int, rounds: int | None, size: int) -> list[int]:
    """Return how many heads are removed after each round; a round removes at least a group of `size` heads."""
    if rounds is not None and rounds < 1:
        raise InputError(f"heads cannot be removed in {rounds} rounds; give at least 1")
    rounds = max(1, min(rounds or MAX_DEFAULT_ROUNDS, count // size))
    return [count * number // rounds for number in range(1, rounds + 1)]


def _number_as_in(
    model: Transformer, removed: Mapping[str, list[int]], importances: Iterable[HeadImportance]
) -> list[HeadImportance]:
    """Return the importances with the numbers that the heads had before others were removed."""
    kept = {
        layer: [head for head in range(config.heads) if head not in removed.get(layer, ())]
        for layer, config in attention_layers(model.config).items()
    }
    return [row._replace(head=kept[row.layer][row.head]) for row in importances]
