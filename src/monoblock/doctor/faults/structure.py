"""Faults of structure, planted by replacing masks, methods and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import EmbeddingConfig
from monoblock.doctor.faults.fault import Fault, Plant, Setup, change_output
from monoblock.nn.attention import AttentionContext
from monoblock.nn.cache import CacheWrite, KeyValues, LayerCache
from monoblock.nn.masks import Mask, MaskTerm, causal, same_document, window
from monoblock.nn.norm import Norm
from monoblock.nn.positions import RotaryAngles, apply_rotary

# -- means of planting ----------------------------------------------------------------------------------------------


def _masks(make: Callable[[Setup], Mask]) -> Plant:
    """Replace the mask of every layer."""

    def plant(setup: Setup) -> None:
        setup.stack.masks = [make(setup)] * len(setup.stack.masks)

    return plant


def _call(change: Callable[[dict[str, Any], Tensor], object]) -> Plant:
    """Change the options of each call of the model, which are given with its input."""

    def plant(setup: Setup) -> None:
        model: Any = setup.model
        forward = model.forward

        def wrapped(source: Any, *args: Any, **options: Any) -> Any:
            change(options, source)
            return forward(source, *args, **options)

        model.forward = wrapped

    return plant


def _attention(
    *,
    scale: Callable[[int], float] | None = None,
    mask_after: bool = False,
    half: bool = False,
    rotate: bool = False,
    axis: int = -1,
    hidden: float = float("-inf"),
    inverted: bool = False,
    split: bool = True,
    merge: bool = True,
) -> Plant:
    """Compute attention step by step, with a fault.

    scale: the factor on the scores, of the head size.
    split, merge: whether heads are transposed where they are split and merged.
    """

    def plant(setup: Setup) -> None:
        for block in setup.blocks:
            size = block.attention.config.key_size(setup.model.config.width)
            factor = scale(size) if scale is not None else block.attention.config.scale or size**-0.5
            block.attention.attend = partial(attend, factor=factor)

    def attend(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Any = None, *, factor: float) -> Tensor:
        if rotate and context.rotary_angles is not None and q.shape[2] == k.shape[2]:
            q, k = apply_rotary(q, context.rotary_angles), apply_rotary(k, context.rotary_angles)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        if not split:
            q, k, v = (t.transpose(1, 2).reshape(t.shape) for t in (q, k, v))
        scores, mask = q @ k.mT * factor, context.dense_mask()
        if context.bias is not None:
            scores = scores + context.bias
        if mask is not None and not mask_after:
            scores = scores.masked_fill(mask if inverted else ~mask, hidden)
        weights = (scores.half() if half else scores).softmax(axis)
        if mask is not None and mask_after:
            weights = weights * mask
        out = weights.to(v.dtype) @ v
        return out if merge else out.reshape(out.transpose(1, 2).shape).transpose(1, 2)

    return plant


def _without_residual(*branches: str) -> Plant:
    """Let the results of some sublayers replace the stream."""

    def plant(setup: Setup) -> None:
        for block in setup.blocks:
            block._apply_sublayer = partial(apply, block, block._apply_sublayer)

    def apply(block: Any, original: Any, x: Tensor, name: str, *args: Any) -> Tensor:
        config = block.config
        try:
            block.config = replace(config, residual="none") if name in branches else config
            return original(x, name, *args)
        finally:
            block.config = config

    return plant


# -- faults of several lines ----------------------------------------------------------------------------------------


def _mask(name: str, condition: Callable[[Any, Any], Any]) -> Mask:
    return Mask((MaskTerm(name, condition),)) & same_document


def _seen_beyond_prefix(q: Any, k: Any) -> Any:
    return k.positions <= q.positions if k.prefix_or_global is None else k.positions >= 0


def _arange(source: Tensor) -> Tensor:
    return torch.arange(source.shape[1], device=source.device).expand(source.shape[0], -1)


def _padding_counted(options: dict[str, Any], source: Tensor) -> None:
    if options.get("attention_mask") is not None and options.get("cache") is None:
        options["positions"] = _arange(source)


def _packing_leak(options: dict[str, Any], source: Tensor) -> None:
    documents = options.pop("documents", None)
    if documents is not None:
        begins = torch.where(documents == 0, 0, (documents == 0).sum(1, keepdim=True))
        options["positions"] = _arange(source) - begins


def _packing_positions(options: dict[str, Any], source: Tensor) -> None:
    if options.get("documents") is not None:
        options["positions"] = _arange(source)


def _cache_position_off_by_one(options: dict[str, Any], source: Tensor) -> None:
    cache = options.get("cache")
    if cache is not None and cache.max_length:
        options["positions"] = cache.lengths[:, None] + _arange(source) - 1


def _cache_padding_position(options: dict[str, Any], source: Tensor) -> None:
    cache, mask = options.get("cache"), options.get("attention_mask")
    if cache is None:
        return
    if not cache.max_length:
        cache.padding = 0 if mask is None else (mask == 0).sum(1)
    elif isinstance(cache.padding, Tensor):
        options["positions"] = cache.lengths[:, None] + cache.padding[:, None] + _arange(source)


def _padding_in_pooling(setup: Setup) -> None:
    head: Any = setup.model.head
    forward = head.forward
    head.forward = lambda hidden, **options: forward(hidden, **{**options, "valid": None})


def _cache_unrotated_keys(setup: Setup) -> None:
    for block in setup.blocks:

        def forward(
            x: Tensor, context: Any, *, layer_cache: Any = None, original: Any = block.attention.forward, **options: Any
        ) -> Any:
            if layer_cache is not None:
                layer_cache = _UnrotatedCache(layer_cache, context.rotary_angles)
            return original(x, context, layer_cache=layer_cache, **options)

        block.attention.forward = forward


class _UnrotatedCache:
    """A cache of a layer that undoes the rotation of keys."""

    def __init__(self, layer_cache: LayerCache, angles: RotaryAngles) -> None:
        self.layer_cache, self.back = layer_cache, angles._replace(sin=-angles.sin)

    def update(self, keys: Tensor, values: Tensor, write: CacheWrite) -> KeyValues:
        return self.layer_cache.update(apply_rotary(keys, self.back), values, write)


def _cache_of_another_layer(setup: Setup) -> None:
    model: Any = setup.model
    make_cache = model.make_cache

    def shared(*args: Any, **options: Any) -> Any:
        cache = make_cache(*args, **options)
        cache.layers[1] = cache.layers[0]
        return cache

    model.make_cache = shared


def _positions_added_twice(setup: Setup) -> None:
    module: Any = setup.model.input
    forward = module.forward

    def twice(ids: Tensor, positions: Any, **options: Any) -> Tensor:
        return forward(ids, positions, **options) + module.position(
            positions.positions + module.config.positions.offset
        )

    module.forward = twice


def _positions_in_every_layer(setup: Setup) -> None:
    table: Any = setup.model.input.position
    for block in setup.blocks[1:]:  # the first has them from the embeddings
        block.register_forward_pre_hook(lambda _, args: (args[0] + table.weight[: args[0].shape[1]], *args[1:]))


def _position_offset(setup: Setup) -> None:
    table: Any = setup.model.input.position
    rows = table.num_embeddings
    table.register_forward_pre_hook(lambda _, inputs: ((inputs[0] + 1).clamp(max=rows - 1),))


def _source_padding_in_cross(setup: Setup) -> None:
    decoder: Any = setup.model.decoder
    original = decoder._memory_context
    decoder._memory_context = lambda q, memory, cache, x: original(
        q, None if memory is None else replace(memory, valid=None), cache, x
    )


def _untied_copy(setup: Setup) -> None:
    head: Any = setup.model.head
    embedding = setup.model.output_embedding
    assert isinstance(embedding, Tensor)
    assert isinstance(setup.model.config.input, EmbeddingConfig)
    head.untied = nn.Linear(embedding.shape[1], embedding.shape[0], bias=False)
    head.untied.weight = nn.Parameter(embedding.detach().clone())
    forward = head.forward
    head.forward = lambda hidden, **options: forward(hidden, **{**options, "table": head.untied.weight})


def _no_nonlinearity(setup: Setup) -> None:
    for block in setup.blocks:
        block.feedforward.activation = lambda x: x


def _no_norms(setup: Setup) -> None:
    for module in list(setup.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Norm):
                setattr(module, name, nn.Identity())


def _one_block_for_all(setup: Setup) -> None:
    for number in range(1, len(setup.blocks)):
        setup.stack.add_module(str(number), setup.blocks[0])


def _blocks_not_called(setup: Setup) -> None:
    stack: Any = setup.stack
    stack.forward = lambda x, *args, **options: stack.norm(x)


class _Unregistered(nn.Module):
    """A block that is kept in a list, where torch does not find its weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.kept = [block]

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.kept[0](*args, **options)


def _blocks_not_registered(setup: Setup) -> None:
    for number, block in enumerate(setup.blocks):
        setup.stack._modules[str(number)] = _Unregistered(block)


def _dropout_after_logits(setup: Setup) -> None:
    head: Any = setup.model.head
    head.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1, module.training))


@torch.no_grad()
def _weights_zero(setup: Setup) -> None:
    for weight in setup.model.parameters():
        weight.zero_()


# -- the table -----------------------------------------------------------------------------------------------------

STRUCTURE = (
    Fault("no_causal_mask", "the causal mask is forgotten", "causality", _masks(lambda s: same_document)),
    Fault("mask_off_by_one", "a token also sees the next one", "causality",
          _masks(lambda s: _mask("causal but one", lambda q, k: k.positions <= q.positions + 1))),
    Fault("leaking_convolution", "a convolution reads the next token", "causality",
          change_output(lambda s: s.blocks[0].feedforward, lambda out: out + 0.5 * F.pad(out[:, 1:], (0, 0, 0, 1)))),
    Fault("sequence_norm", "a norm takes its mean over the whole text", "causality",
          change_output(lambda s: s.blocks[0].attention_norm, lambda out: out - out.mean(1, keepdim=True))),
    Fault("prefix_leak", "tokens after the prefix are seen too", "prefix",
          _masks(lambda s: _mask("prefix and more", _seen_beyond_prefix)), "prefix"),
    Fault("window_off_by_one", "a window is one token too long", "window",
          _masks(lambda s: causal & window(s.blocks[0].attention.config.window + 1) & same_document), "window"),
    Fault("window_forgotten", "a window is not applied", "window", _masks(lambda s: causal & same_document), "window"),
    Fault("padding_mask_dropped", "the padding mask is not passed on", "padding",
          _call(lambda options, _: options.update(attention_mask=None)), "encoder"),
    Fault("padding_counted", "positions count the padding", "padding", _call(_padding_counted), "learned positions"),
    Fault("padding_in_pooling", "padding is averaged with the tokens", "padding", _padding_in_pooling, "classifier"),
    Fault("batch_norm", "a norm takes its mean over the batch", "batch",
          change_output(lambda s: s.blocks[0].attention_norm, lambda out: out - 0.5 * out.mean(0, keepdim=True))),
    Fault("rows_mixed", "a reshape mixes the rows of a batch", "batch",
          change_output(lambda s: s.blocks[-1].attention, lambda out: out + 0.5 * out.roll(1, 0))),
    Fault("packing_leak", "packed documents see each other", "packing", _call(_packing_leak)),
    Fault("packing_positions", "positions go on in the next packed document", "packing",
          _call(_packing_positions), "learned positions"),
    Fault("cache_position_off_by_one", "a cached step has the position before", "cache",
          _call(_cache_position_off_by_one)),
    Fault("cache_padding_position", "a cached step counts the padding", "cache",
          _call(_cache_padding_position), "learned positions"),
    Fault("cache_unrotated_keys", "keys are cached before they are rotated", "cache",
          _cache_unrotated_keys, "rotary positions"),
    Fault("cache_of_another_layer", "two layers write to one cache", "cache", _cache_of_another_layer),
    Fault("no_positions", "positions are never added", "positions",
          change_output(lambda s: s.model.input.position, lambda out: out * 0), "learned positions"),
    Fault("positions_added_twice", "positions are added twice", "positions_twice",
          _positions_added_twice, "learned positions"),
    Fault("positions_in_every_layer", "positions are added in every layer", "positions_twice",
          _positions_in_every_layer, "learned positions"),
    Fault("rotated_twice", "queries and keys are rotated twice", "positions_twice",
          _attention(rotate=True), "rotary positions"),
    Fault("position_offset", "positions begin at 1", "position_offset", _position_offset, "learned positions"),
    Fault("source_padding_in_cross", "cross-attention ignores source padding", "cross_padding",
          _source_padding_in_cross, "encoder-decoder"),
    Fault("untied_copy", "the tied output is a copy", "tying", _untied_copy, "tied decoder"),
    Fault("dropout_left_on", "dropout is on in evaluation", "dropout",
          change_output(lambda s: s.blocks[0].feedforward, lambda out: F.dropout(out, 0.1, training=True))),
    Fault("softmax_in_fp16", "the softmax is computed in fp16", "softmax_precision", _attention(half=True)),
    Fault("mask_after_softmax", "the mask multiplies the weights", "mask_after_softmax", _attention(mask_after=True)),
    Fault("softmax_over_queries", "the softmax is taken over the queries", "mask_after_softmax", _attention(axis=-2)),
    Fault("softmax_over_heads", "the softmax is taken over the heads", "overflow", _attention(axis=1)),
    Fault("softmax_over_rows", "the softmax is taken over the batch", "overflow", _attention(axis=0)),
    Fault("mask_inverted", "the mask hides what comes before", "overflow", _attention(inverted=True)),
    Fault("mask_filled_with_zero", "masked scores are set to 0", "causality", _attention(hidden=0.0)),
    Fault("heads_split_without_transpose", "a head is made of whole tokens", "causality", _attention(split=False)),
    Fault("heads_merged_without_transpose", "a token is made of pieces of others", "causality",
          _attention(merge=False)),
    Fault("scale_missing", "scores are not divided by sqrt(head size)", "scale", _attention(scale=lambda size: 1.0)),
    Fault("scale_inverted", "scores are multiplied by sqrt(head size)", "scale",
          _attention(scale=lambda size: size**0.5)),
    Fault("one_position_for_all", "all tokens get the first position", "positions",
          change_output(lambda s: s.model.input.position, lambda out: out[..., :1, :].expand_as(out)),
          "learned positions"),
    Fault("no_residuals", "no sublayer is added to the stream", "gradient_flow",
          _without_residual("attention", "feedforward"), "sequential decoder"),
    Fault("no_attention_residual", "attention replaces the stream", "gradient_flow",
          _without_residual("attention"), "sequential decoder"),
    Fault("no_feedforward_residual", "the feed-forward layer replaces the stream", "gradient_flow",
          _without_residual("feedforward"), "sequential decoder"),
    Fault("no_nonlinearity", "the feed-forward layer is two matrices", "gradient_flow",
          _no_nonlinearity, "decoder without gates"),
    Fault("no_norms", "no norm anywhere", "residual_growth", _no_norms),
    Fault("one_block_for_all", "all layers are one block", "tying", _one_block_for_all, "own blocks"),
    Fault("blocks_not_called", "the blocks are built and not run", "gradient_flow", _blocks_not_called),
    Fault("blocks_not_registered", "the blocks are in a plain list", "gradient_flow", _blocks_not_registered),
    Fault("dropout_after_logits", "dropout comes after the output layer", "dropout", _dropout_after_logits),
    Fault("weights_zero", "all weights are zero", "gradient_flow", _weights_zero),
)  # fmt: skip
