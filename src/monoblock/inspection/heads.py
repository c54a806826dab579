"""Head pruning (Voita et al. 2019; Michel et al. 2019): a physically smaller model without the heads named.

    smaller = prune_heads(model, {"encoder.0.attention": [1, 3], "decoder.2.cross": [0]})

What remains computes exactly what the whole model computes when the pruned heads give nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.config import AttentionConfig, BlockConfig, ModelConfig, Repeat, StackConfig
from monoblock.errors import InputError, did_you_mean
from monoblock.model import Transformer


def prune_heads(model: Transformer, heads: Mapping[str, Iterable[int]]) -> Transformer:
    """A new model without these heads, named by attention: "decoder.3.attention", "decoder.3.cross"."""
    keep = {name: _kept(model.config, name, sorted(set(dropped))) for name, dropped in heads.items()}
    with torch.device("meta"):
        smaller = Transformer(_smaller(model.config, keep))
    weights = dict(model.state_dict())
    for name, kept in keep.items():
        config = _attention(model.config, name)
        for part in [key for key in weights if key.startswith(f"{name}.")]:
            weights[part] = _cut(weights[part], part.removeprefix(f"{name}."), config, kept)
    owned = {name: tensor.clone() for name, tensor in weights.items()}
    smaller.load_state_dict(owned, assign=True)
    return smaller.train(model.training)


def _attention(config: ModelConfig, name: str) -> AttentionConfig:
    """The configuration of an attention by its name."""
    known = {
        f"{stack}.{layer}.{kind}": attention
        for stack, whole in config.stacks.items()
        for layer, block in enumerate(whole.layers())
        for kind, attention in (("attention", block.attention), ("cross", block.cross))
        if attention is not None
    }
    if name not in known:
        raise InputError(f"there is no attention {name!r}{did_you_mean(name, known)}")
    return known[name]


def _kept(config: ModelConfig, name: str, dropped: list[int]) -> list[int]:
    """The query heads that stay, checked: whole groups only, at least one, nothing normed across heads."""
    attention = _attention(config, name)
    stack, layer, _ = name.split(".")
    tied = any(run.tied and run.times > 1 for run in config.stacks[stack].pattern)
    if tied:
        raise InputError(f"the {stack}'s layers share their weights; heads cannot be pruned from layer {layer} alone")
    if any(not 0 <= head < attention.heads for head in dropped):
        raise InputError(f"{name} has heads 0 to {attention.heads - 1}; {dropped} cannot all be pruned")
    if attention.groups == 1 and attention.heads > 1:
        raise InputError(f"all heads of {name} share one set of keys and values; none can be taken away alone")
    kept = [head for head in range(attention.heads) if head not in dropped]
    if not kept:
        raise InputError(f"{name} would lose all its {attention.heads} heads; leave at least one")
    if attention.qk_norm is not None and attention.qk_norm_over == "width":
        raise InputError(f"{name} norms its queries across all heads, so none can be taken away alone")
    size = attention.heads // attention.groups
    if size > 1 and any(
        (head // size * size + place in kept) != (head in kept) for head in kept for place in range(size)
    ):
        raise InputError(f"{name} shares keys among {size} heads; prune whole groups, such as {list(range(size))}")
    return kept


def _smaller(config: ModelConfig, keep: Mapping[str, list[int]]) -> ModelConfig:
    stacks = {name: _smaller_stack(name, stack, config.width, keep) for name, stack in config.stacks.items()}
    return replace(config, **stacks)  # type: ignore[arg-type]


def _smaller_stack(name: str, stack: StackConfig, width: int, keep: Mapping[str, list[int]]) -> StackConfig:
    if not any(key.startswith(f"{name}.") for key in keep):
        return stack
    layers = [_smaller_block(f"{name}.{n}", block, width, keep) for n, block in enumerate(stack.layers())]
    return replace(stack, pattern=tuple(Repeat(blocks=(block,)) for block in layers))


def _smaller_block(name: str, block: BlockConfig, width: int, keep: Mapping[str, list[int]]) -> BlockConfig:
    changed = {
        kind: _smaller_attention(getattr(block, kind), width, keep[f"{name}.{kind}"])
        for kind in ("attention", "cross")
        if f"{name}.{kind}" in keep
    }
    return replace(block, **changed)  # type: ignore[arg-type]


def _smaller_attention(config: AttentionConfig, width: int, kept: list[int]) -> AttentionConfig:
    size = config.heads // config.groups
    before = config.kept_heads or tuple(range(config.heads))
    return replace(
        config,
        heads=len(kept),
        kv_heads=len(kept) // size if size > 1 else None,
        head_dim=config.key_size(width),
        value_dim=config.value_size(width) if config.value_dim is not None else None,
        kept_heads=tuple(before[head] for head in kept) if config.positions is not None else (),
        unpruned_heads=config.all_heads if config.positions is not None else None,
    )


def _cut(tensor: Tensor, part: str, config: AttentionConfig, kept: list[int]) -> Tensor:
    """The rows (or columns, of the output matrix) of one weight that belong to kept heads."""
    size = config.heads // config.groups
    groups = kept if size == 1 else [head // size for head in kept[::size]]
    match part.split("."):
        case ["query", _]:
            return tensor.unflatten(0, (config.heads, -1))[kept].flatten(0, 1)
        case ["key" | "value", _]:
            return tensor.unflatten(0, (config.groups, -1))[groups].flatten(0, 1)
        case ["output", "weight"]:
            return tensor.unflatten(1, (config.heads, -1))[:, kept].flatten(1)
        case ["query_norm", _] if tensor.dim() > 1:  # a weight for each head
            return tensor[kept]
        case ["key_norm", _] if tensor.dim() > 1:
            return tensor[groups]
        case ["sinks"]:
            return tensor[kept]
    return tensor
