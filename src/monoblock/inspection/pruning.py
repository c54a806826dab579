"""Head pruning (Voita et al. 2019; Michel et al. 2019): remove attention heads and their weights.

    smaller = prune_heads(model, {"encoder.0.attention": [1, 3], "decoder.2.cross": [0]})

The pruned model computes the same as the original model with the outputs of these heads set to zero.

How important a head is for a loss is measured by gradient (Michel et al. 2019) or by ablation.  By gradient, it is the
mean over the batches of |Σ heads · ∂loss/∂heads|: to first order, by how much the loss would change if the output of
the head were zero.  By ablation, it is that change, measured; an ablation takes one pass for each head.

`prune_in_rounds` removes the least important heads in several rounds, and measures importance anew after each.  Of two
heads that do the same, each alone seems unimportant; once one of them is removed, the other is needed.  One ranking for
all heads removes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from monoblock.config.model import AttentionConfig, ModelConfig, Repeat
from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.edits import ablate
from monoblock.inspection.trace import TraceTap, attach_tap
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import merge_adapters

T = TypeVar("T", bound=Transformer)


def prune_heads(model: T, heads: Mapping[str, Iterable[int]]) -> T:
    """Return a copy of a model without the given heads.

    `heads` maps the name of an attention layer to the indices of its heads to remove, such as
    {"decoder.3.attention": [0, 2]}.  Adapters are merged into their weights first.
    """
    model = merge_adapters(model)
    keep = {name: _heads_to_keep(model.config, name, sorted(set(pruned))) for name, pruned in heads.items()}
    with torch.device("meta"):
        smaller = type(model)(_prune_config(model.config, keep))
    state = dict(model.state_dict())
    for name, kept in keep.items():
        config = attention_layers(model.config)[name]
        for key in [key for key in state if key.startswith(f"{name}.")]:
            state[key] = _slice_weight(state[key], key.removeprefix(f"{name}."), config, kept)
    smaller.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return smaller.train(model.training)


def attention_layers(config: ModelConfig) -> dict[str, AttentionConfig]:
    """Return the configurations of the attention layers by name, such as "decoder.3.cross"."""
    return {
        f"{stack_name}.{layer}.{kind}": attention
        for stack_name, stack in config.stacks.items()
        for layer, block in enumerate(stack.layers())
        for kind, attention in (("attention", block.attention), ("cross", block.cross))
        if attention is not None
    }


def prunable_group_size(config: ModelConfig, name: str) -> int:
    """Return how many heads of a layer share keys and values, and can be pruned only together.

    Raise InputError if no head of the layer can be pruned: if its weights are shared with other layers, if all heads
    share one set of keys and values, or if the queries of all heads are normalized together.
    """
    known = attention_layers(config)
    if name not in known:
        raise InputError(f"there is no attention layer {name!r}{did_you_mean(name, known)}")
    attention, (stack, layer, _) = known[name], name.split(".")
    if any(repeat.tied and repeat.times > 1 for repeat in config.stacks[stack].pattern):
        raise InputError(
            f"the layers of the {stack} share their weights, so heads cannot be pruned from layer {layer} alone; "
            f"leave {name} out"
        )
    if attention.num_kv_heads == 1 and attention.heads > 1:
        raise InputError(
            f"all heads of {name} share one set of keys and values, so none can be pruned; leave {name} out"
        )
    if attention.qk_norm is not None and attention.qk_norm_over == "width":
        raise InputError(f"{name} normalizes its queries across all heads, so none can be pruned; leave {name} out")
    return attention.heads // attention.num_kv_heads


def _heads_to_keep(config: ModelConfig, name: str, pruned: list[int]) -> list[int]:
    """Return the indices of the query heads that remain after pruning.

    Raise InputError if no head would remain, or if only some of the heads that share keys would be pruned.
    """
    size, attention = prunable_group_size(config, name), attention_layers(config)[name]
    if any(not 0 <= head < attention.heads for head in pruned):
        raise InputError(
            f"{name} has heads 0 to {attention.heads - 1}, but heads {pruned} were given; give indices in this range"
        )
    kept = [head for head in range(attention.heads) if head not in pruned]
    if not kept:
        raise InputError(f"{name} would lose all its {attention.heads} heads; keep at least one")
    groups = {head // size for head in kept}
    if len(kept) != size * len(groups):
        raise InputError(
            f"every {size} heads of {name} share one set of keys and values; prune such groups as a whole, for example "
            f"heads {list(range(size))}"
        )
    return kept


def _prune_config(config: ModelConfig, keep: Mapping[str, list[int]]) -> ModelConfig:
    """Return the configuration without the heads that are not kept; the layers of such stacks may all differ."""
    stacks: dict[str, Any] = {}
    for stack_name in {name.partition(".")[0] for name in keep}:
        stack, blocks = config.stacks[stack_name], []
        for layer, block in enumerate(stack.layers()):
            changed: dict[str, Any] = {
                kind: _prune_attention(getattr(block, kind), config.width, keep[f"{stack_name}.{layer}.{kind}"])
                for kind in ("attention", "cross")
                if f"{stack_name}.{layer}.{kind}" in keep
            }
            blocks.append(Repeat(blocks=(replace(block, **changed),)))
        stacks[stack_name] = replace(stack, pattern=tuple(blocks))
    return replace(config, **stacks)


def _prune_attention(config: AttentionConfig, width: int, kept: list[int]) -> AttentionConfig:
    size = config.heads // config.num_kv_heads
    original_heads = config.kept_heads or tuple(range(config.heads))
    return replace(
        config,
        heads=len(kept),
        kv_heads=len(kept) // size if size > 1 else None,
        head_dim=config.key_size(width),
        value_dim=config.value_size(width) if config.value_dim is not None else None,
        kept_heads=tuple(original_heads[head] for head in kept) if config.positions is not None else (),
        unpruned_heads=config.num_unpruned_heads if config.positions is not None else None,
    )


def _slice_weight(tensor: Tensor, parameter: str, config: AttentionConfig, kept: list[int]) -> Tensor:
    """Select the rows of a weight, or the columns of the output matrix, that belong to kept heads."""
    size = config.heads // config.num_kv_heads
    groups = kept if size == 1 else [head // size for head in kept[::size]]
    match parameter.split("."):
        case ["query", _]:
            return tensor.unflatten(0, (config.heads, -1))[kept].flatten(0, 1)
        case ["key" | "value", _]:
            return tensor.unflatten(0, (config.num_kv_heads, -1))[groups].flatten(0, 1)
        case ["output", "weight"]:
            return tensor.unflatten(1, (config.heads, -1))[:, kept].flatten(1)
        case ["query_norm", _] if tensor.dim() > 1:  # with a weight for each head
            return tensor[kept]
        case ["key_norm", _] if tensor.dim() > 1:
            return tensor[groups]
        case ["sinks"]:
            return tensor[kept]
    return tensor


ImportanceMethod = Literal["gradient", "ablation"]
BatchLoss = Callable[[nn.Module, Any], Tensor]  # the loss of a batch, summed over its targets


class HeadImportance(NamedTuple):
    layer: str  # such as "decoder.3.attention"
    head: int
    importance: float


def head_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: BatchLoss,
    *,
    method: ImportanceMethod = "gradient",
    names: str | Sequence[str] = "*.heads",
    progress: Callable[[int], None] = lambda count: None,
) -> list[HeadImportance]:
    """Return the importance of every head, in the order of the layers.

    batches: what `loss(model, batch)` takes.
    names: patterns of the outputs of heads, (B, H, T, K).
    progress: a function that is called with 1 after every pass over a batch, or over all batches by ablation.
    """
    batches = list(batches)
    if not batches:
        raise InputError("there is no batch to rank heads on; give more data")
    if method not in METHODS:
        raise InputError(f"there is no importance {method!r}; write one of {', '.join(METHODS)}")
    was_training = model.training
    model.eval()
    try:
        totals = METHODS[method](model, batches, loss, names, progress)
    finally:
        model.train(was_training)
    return [
        HeadImportance(name.removesuffix(".heads"), head, value / len(batches))
        for name, values in totals.items()
        for head, value in enumerate(values.tolist())
    ]


def _by_gradient(
    model: nn.Module, batches: list[Any], loss: BatchLoss, names: Any, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for batch in batches:
        tap = TraceTap(names, with_gradients=True)
        with attach_tap(model, tap), torch.enable_grad():
            value = loss(model, batch)
        tap.check()
        grads = torch.autograd.grad(value, list(tap.activations.values()), allow_unused=True)
        for (name, heads), grad in zip(tap.activations.items(), grads, strict=True):
            effect = heads.detach() * (torch.zeros_like(heads) if grad is None else grad)
            totals[name] = totals.get(name, 0) + effect.sum((2, 3)).abs().sum(0).double().cpu()
        progress(1)
    return totals


@torch.no_grad()
def _by_ablation(
    model: nn.Module, batches: list[Any], loss: BatchLoss, names: Any, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    tap = TraceTap(names)
    with attach_tap(model, tap):
        loss(model, batches[0])
    tap.check()
    before = sum(float(loss(model, batch)) for batch in batches)
    totals = {}
    for name, tensor in tap.activations.items():
        changes = []
        for head in range(tensor.shape[1]):
            with attach_tap(model, TraceTap(edits=[ablate(name, heads=[head])])):
                changes.append(sum(float(loss(model, batch)) for batch in batches) - before)
            progress(1)
        totals[name] = torch.tensor(changes, dtype=torch.float64)
    return totals


METHODS: dict[str, Callable[..., dict[str, Tensor]]] = {"gradient": _by_gradient, "ablation": _by_ablation}


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
        last = {group.layer: len(group.heads) for group in groups}  # a group of each layer is kept
        most, size = sum(len(group.heads) for group in groups) - sum(last.values()), max(last.values())
        if count > most:
            why = f"each layer keeps a head, so that at most {most} can be removed, not {count}; remove fewer"
        else:
            why = f"{size} heads share keys and values and are removed together; remove {removed}, not {count}"
        raise InputError(why)
    return {layer: sorted(heads) for layer, heads in chosen.items()}


MAX_DEFAULT_ROUNDS = 16


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
    if rounds is not None and rounds < 1:
        raise InputError(f"heads cannot be removed in {rounds} rounds; give at least 1")
    rounds = max(1, min(rounds or MAX_DEFAULT_ROUNDS, count // max(sizes.values())))  # each removes at least a group
    names = [f"{layer}.heads" for layer in sizes]
    smaller, removed = model, dict[str, list[int]]()
    history: list[HeadGroup] = []
    kept: list[HeadGroup] = []
    for number in range(1, rounds + 1):
        left = {  # the numbers that the heads of each layer have in the original model
            layer: [head for head in range(config.heads) if head not in removed.get(layer, ())]
            for layer, config in attention_layers(model.config).items()
        }
        measured = head_importance(smaller, batches, loss, method=method, names=names, progress=progress)
        rows = [row._replace(head=left[row.layer][row.head]) for row in measured]
        kept = rank_heads(sizes, rows, normalize=method == "gradient")
        target = count * number // rounds  # heads removed after this round
        chosen = choose_heads(kept, target - sum(map(len, removed.values())), exact=target == count)
        removed = {layer: sorted([*removed.get(layer, ()), *chosen.get(layer, ())]) for layer in {**removed, **chosen}}
        history += [group for group in kept if group.heads[0] in removed.get(group.layer, ())]
        smaller = prune_heads(model, removed)
    kept = [group for group in kept if group.heads[0] not in removed.get(group.layer, ())]
    return PrunedHeads(smaller, removed, history + kept, rounds)
