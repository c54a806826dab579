"""Head pruning (Voita et al. 2019; Michel et al. 2019): remove attention heads and their weights.

    smaller = prune_heads(model, {"encoder.0.attention": [1, 3], "decoder.2.cross": [0]})

The pruned model computes the same as the original model with the outputs of these heads set to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from monoblock.config.model import AttentionConfig, BlockConfig, ModelConfig, Repeat, StackConfig
from monoblock.errors import InputError, did_you_mean
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
        config = _find_attention(model.config, name)
        for key in [key for key in state if key.startswith(f"{name}.")]:
            state[key] = _slice_weight(state[key], key.removeprefix(f"{name}."), config, kept)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    smaller.load_state_dict(copies, assign=True)
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


def _find_attention(config: ModelConfig, name: str) -> AttentionConfig:
    known = attention_layers(config)
    if name not in known:
        raise InputError(f"there is no attention layer {name!r}{did_you_mean(name, known)}")
    return known[name]


def prunable_group_size(config: ModelConfig, name: str) -> int:
    """Return how many heads of a layer share keys and values, and can be pruned only together.

    Raise InputError if no head of the layer can be pruned: if its weights are shared with other layers, if all heads
    share one set of keys and values, or if the queries of all heads are normalized together.
    """
    attention = _find_attention(config, name)
    stack, layer, _ = name.split(".")
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
    attention = _find_attention(config, name)
    size = prunable_group_size(config, name)
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
    stacks = {name: _prune_stack(name, stack, config.width, keep) for name, stack in config.stacks.items()}
    return replace(config, **stacks)  # type: ignore[arg-type]


def _prune_stack(name: str, stack: StackConfig, width: int, keep: Mapping[str, list[int]]) -> StackConfig:
    if not any(key.startswith(f"{name}.") for key in keep):
        return stack
    layers = [_prune_block(f"{name}.{n}", block, width, keep) for n, block in enumerate(stack.layers())]
    return replace(stack, pattern=tuple(Repeat(blocks=(block,)) for block in layers))


def _prune_block(name: str, block: BlockConfig, width: int, keep: Mapping[str, list[int]]) -> BlockConfig:
    changed = {
        kind: _prune_attention(getattr(block, kind), width, keep[f"{name}.{kind}"])
        for kind in ("attention", "cross")
        if f"{name}.{kind}" in keep
    }
    return replace(block, **changed)  # type: ignore[arg-type]


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
