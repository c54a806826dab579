"""Faults of structure, planted by replacing masks, methods and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import EmbeddingConfig
from monoblock.doctor.faults.fault import Fault, Patient
from monoblock.nn.attention import AttentionContext
from monoblock.nn.kv_cache.cache_index import CacheWrite
from monoblock.nn.kv_cache.layer_cache import KeyValues, LayerCache
from monoblock.nn.masks import Mask, MaskTerm, causal, same_document, window
from monoblock.nn.norm import Norm
from monoblock.nn.positions import RotaryAngles, apply_rotary


def _replace_masks(patient: Patient, mask: Mask) -> None:
    patient.stack.masks = [mask] * len(patient.stack.masks)


def _wrap_forward(patient: Patient, change: Callable[[dict[str, Any], Tensor], None]) -> None:
    """Change the arguments of the model before each call."""
    model: Any = patient.model
    forward = model.forward

    def wrapped(source: Any, *args: Any, **options: Any) -> Any:
        change(options, source)
        return forward(source, *args, **options)

    model.forward = wrapped


def _hook_output(module: nn.Module, change: Callable[[Any, Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda _, inputs, output: change(inputs[0], output))


def _replace_attention(
    patient: Patient,
    *,
    scale: float | None = None,
    mask_after: bool = False,
    half: bool = False,
    rotate: bool = False,
    axis: int = -1,
    hidden: float = float("-inf"),
    inverted: bool = False,
    split: bool = True,
    merge: bool = True,
) -> None:
    """Compute attention step by step, with a fault: `split` and `merge` say whether heads are transposed there."""
    for block in patient.blocks:
        attention = block.attention
        own = attention.config.scale or attention.config.key_size(patient.model.config.width) ** -0.5

        def attend(
            q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Any = None, *, factor: float = scale or own
        ) -> Tensor:
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

        attention.attend = attend


def _no_causal_mask(patient: Patient) -> None:
    _replace_masks(patient, same_document)


def _mask_off_by_one(patient: Patient) -> None:
    term = MaskTerm("causal but one", lambda q, k: k.positions <= q.positions + 1)
    _replace_masks(patient, Mask((term,)) & same_document)


def _leaking_convolution(patient: Patient) -> None:
    _hook_output(patient.blocks[0].feedforward, lambda _, out: out + 0.5 * F.pad(out[:, 1:], (0, 0, 0, 1)))


def _sequence_norm(patient: Patient) -> None:
    _hook_output(patient.blocks[0].attention_norm, lambda _, out: out - out.mean(1, keepdim=True))


def _prefix_leak(patient: Patient) -> None:
    def seen(q: Any, k: Any) -> Any:
        return k.positions <= q.positions if k.prefix_or_global is None else k.positions >= 0

    _replace_masks(patient, Mask((MaskTerm("prefix and more", seen),)) & same_document)


def _window_off_by_one(patient: Patient) -> None:
    size = patient.blocks[0].attention.config.window
    _replace_masks(patient, causal & window(size + 1) & same_document)


def _window_forgotten(patient: Patient) -> None:
    _replace_masks(patient, causal & same_document)


def _padding_mask_dropped(patient: Patient) -> None:
    _wrap_forward(patient, lambda options, _: options.update(attention_mask=None))


def _arange(source: Tensor) -> Tensor:
    return torch.arange(source.shape[1], device=source.device).expand(source.shape[0], -1)


def _padding_counted(patient: Patient) -> None:
    def change(options: dict[str, Any], source: Tensor) -> None:
        if options.get("attention_mask") is not None and options.get("cache") is None:
            options["positions"] = _arange(source)

    _wrap_forward(patient, change)


def _padding_in_pooling(patient: Patient) -> None:
    head: Any = patient.model.head
    forward = head.forward
    head.forward = lambda hidden, **options: forward(hidden, **{**options, "valid": None})


def _batch_norm(patient: Patient) -> None:
    _hook_output(patient.blocks[0].attention_norm, lambda _, out: out - 0.5 * out.mean(0, keepdim=True))


def _rows_mixed(patient: Patient) -> None:
    _hook_output(patient.blocks[-1].attention, lambda _, out: out + 0.5 * out.roll(1, 0))


def _packing_leak(patient: Patient) -> None:
    def change(options: dict[str, Any], source: Tensor) -> None:
        documents = options.pop("documents", None)
        if documents is not None:
            begins = torch.where(documents == 0, 0, (documents == 0).sum(1, keepdim=True))
            options["positions"] = _arange(source) - begins

    _wrap_forward(patient, change)


def _packing_positions(patient: Patient) -> None:
    def change(options: dict[str, Any], source: Tensor) -> None:
        if options.get("documents") is not None:
            options["positions"] = _arange(source)

    _wrap_forward(patient, change)


def _cache_position_off_by_one(patient: Patient) -> None:
    def change(options: dict[str, Any], source: Tensor) -> None:
        cache = options.get("cache")
        if cache is not None and cache.max_length:
            options["positions"] = cache.lengths[:, None] + _arange(source) - 1

    _wrap_forward(patient, change)


def _cache_padding_position(patient: Patient) -> None:
    def change(options: dict[str, Any], source: Tensor) -> None:
        cache, mask = options.get("cache"), options.get("attention_mask")
        if cache is None:
            return
        if not cache.max_length:
            cache.padding = 0 if mask is None else (mask == 0).sum(1)
        elif isinstance(cache.padding, Tensor):
            options["positions"] = cache.lengths[:, None] + cache.padding[:, None] + _arange(source)

    _wrap_forward(patient, change)


def _cache_unrotated_keys(patient: Patient) -> None:
    for block in patient.blocks:

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


def _cache_of_another_layer(patient: Patient) -> None:
    model: Any = patient.model
    make_cache = model.make_cache

    def shared(*args: Any, **options: Any) -> Any:
        cache = make_cache(*args, **options)
        cache.layers[1] = cache.layers[0]
        return cache

    model.make_cache = shared


def _no_positions(patient: Patient) -> None:
    table: Any = patient.model.input.position
    _hook_output(table, lambda _, out: out * 0)


def _positions_added_twice(patient: Patient) -> None:
    module: Any = patient.model.input
    forward = module.forward

    def twice(ids: Tensor, positions: Any, **options: Any) -> Tensor:
        return forward(ids, positions, **options) + module.position(
            positions.positions + module.config.positions.offset
        )

    module.forward = twice


def _positions_in_every_layer(patient: Patient) -> None:
    table: Any = patient.model.input.position
    for block in patient.blocks[1:]:  # the first has them from the embeddings
        block.register_forward_pre_hook(lambda _, args: (args[0] + table.weight[: args[0].shape[1]], *args[1:]))


def _rotated_twice(patient: Patient) -> None:
    _replace_attention(patient, rotate=True)


def _position_offset(patient: Patient) -> None:
    table: Any = patient.model.input.position
    rows = table.num_embeddings
    table.register_forward_pre_hook(lambda _, inputs: ((inputs[0] + 1).clamp(max=rows - 1),))


def _source_padding_in_cross(patient: Patient) -> None:
    decoder: Any = patient.model.decoder
    original = decoder._memory_context
    decoder._memory_context = lambda q, memory, cache, x: original(
        q, None if memory is None else replace(memory, valid=None), cache, x
    )


def _untied_copy(patient: Patient) -> None:
    head: Any = patient.model.head
    embedding = patient.model.output_embedding
    assert isinstance(embedding, Tensor)
    assert isinstance(patient.model.config.input, EmbeddingConfig)
    head.untied = nn.Linear(embedding.shape[1], embedding.shape[0], bias=False)
    head.untied.weight = nn.Parameter(embedding.detach().clone())
    forward = head.forward
    head.forward = lambda hidden, **options: forward(hidden, **{**options, "table": head.untied.weight})


def _dropout_left_on(patient: Patient) -> None:
    _hook_output(patient.blocks[0].feedforward, lambda _, out: F.dropout(out, 0.1, training=True))


def _softmax_in_fp16(patient: Patient) -> None:
    _replace_attention(patient, half=True)


def _mask_after_softmax(patient: Patient) -> None:
    _replace_attention(patient, mask_after=True)


def _softmax_over_queries(patient: Patient) -> None:
    _replace_attention(patient, axis=-2)


def _softmax_over_heads(patient: Patient) -> None:
    _replace_attention(patient, axis=1)


def _softmax_over_rows(patient: Patient) -> None:
    _replace_attention(patient, axis=0)


def _mask_inverted(patient: Patient) -> None:
    _replace_attention(patient, inverted=True)


def _mask_filled_with_zero(patient: Patient) -> None:
    _replace_attention(patient, hidden=0.0)


def _heads_split_without_transpose(patient: Patient) -> None:
    _replace_attention(patient, split=False)


def _heads_merged_without_transpose(patient: Patient) -> None:
    _replace_attention(patient, merge=False)


def _scale_missing(patient: Patient) -> None:
    _replace_attention(patient, scale=1.0)


def _scale_inverted(patient: Patient) -> None:
    _replace_attention(patient, scale=patient.blocks[0].attention.config.key_size(patient.model.config.width) ** 0.5)


def _one_position_for_all(patient: Patient) -> None:
    table: Any = patient.model.input.position
    _hook_output(table, lambda _, out: out[..., :1, :].expand_as(out))


def _without_residual(patient: Patient, *branches: str) -> None:
    """Let the result of some sublayers replace the stream."""
    for block in patient.blocks:

        def apply(
            x: Tensor, name: str, *args: Any, block: Any = block, original: Any = block._apply_sublayer
        ) -> Tensor:
            config = block.config
            try:
                block.config = replace(config, residual="none") if name in branches else config
                return original(x, name, *args)
            finally:
                block.config = config

        block._apply_sublayer = apply


def _no_residuals(patient: Patient) -> None:
    _without_residual(patient, "attention", "feedforward")


def _no_attention_residual(patient: Patient) -> None:
    _without_residual(patient, "attention")


def _no_feedforward_residual(patient: Patient) -> None:
    _without_residual(patient, "feedforward")


def _no_nonlinearity(patient: Patient) -> None:
    for block in patient.blocks:
        block.feedforward.activation = lambda x: x


def _no_norms(patient: Patient) -> None:
    for module in list(patient.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Norm):
                setattr(module, name, nn.Identity())


def _one_block_for_all(patient: Patient) -> None:
    for number in range(1, len(patient.blocks)):
        patient.stack.add_module(str(number), patient.blocks[0])


def _blocks_not_called(patient: Patient) -> None:
    stack: Any = patient.stack
    stack.forward = lambda x, *args, **options: stack.norm(x)


class _InAList(nn.Module):
    """A block that is kept in a list, where torch does not find its weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.kept = [block]

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.kept[0](*args, **options)


def _blocks_not_registered(patient: Patient) -> None:
    for number, block in enumerate(patient.blocks):
        patient.stack._modules[str(number)] = _InAList(block)


def _dropout_after_logits(patient: Patient) -> None:
    head: Any = patient.model.head
    head.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1, module.training))


@torch.no_grad()
def _weights_zero(patient: Patient) -> None:
    for weight in patient.model.parameters():
        weight.zero_()


STRUCTURE = (
    Fault("no_causal_mask", "the causal mask is forgotten", "causality", _no_causal_mask),
    Fault("mask_off_by_one", "a token also sees the next one", "causality", _mask_off_by_one),
    Fault("leaking_convolution", "a convolution reads the next token", "causality", _leaking_convolution),
    Fault("sequence_norm", "a norm takes its mean over the whole text", "causality", _sequence_norm),
    Fault("prefix_leak", "tokens after the prefix are seen too", "prefix", _prefix_leak, "prefix"),
    Fault("window_off_by_one", "a window is one token too long", "window", _window_off_by_one, "window"),
    Fault("window_forgotten", "a window is not applied", "window", _window_forgotten, "window"),
    Fault("padding_mask_dropped", "the padding mask is not passed on", "padding", _padding_mask_dropped, "encoder"),
    Fault("padding_counted", "positions count the padding", "padding", _padding_counted, "learned positions"),
    Fault("padding_in_pooling", "padding is averaged with the tokens", "padding", _padding_in_pooling, "classifier"),
    Fault("batch_norm", "a norm takes its mean over the batch", "batch", _batch_norm),
    Fault("rows_mixed", "a reshape mixes the rows of a batch", "batch", _rows_mixed),
    Fault("packing_leak", "packed documents see each other", "packing", _packing_leak),
    Fault("packing_positions", "positions go on in the next packed document", "packing", _packing_positions,
          "learned positions"),
    Fault("cache_position_off_by_one", "a cached step has the position before", "cache", _cache_position_off_by_one),
    Fault("cache_padding_position", "a cached step counts the padding", "cache", _cache_padding_position,
          "learned positions"),
    Fault("cache_unrotated_keys", "keys are cached before they are rotated", "cache", _cache_unrotated_keys,
          "rotary positions"),
    Fault("cache_of_another_layer", "two layers write to one cache", "cache", _cache_of_another_layer),
    Fault("no_positions", "positions are never added", "positions", _no_positions, "learned positions"),
    Fault("positions_added_twice", "positions are added twice", "positions_twice", _positions_added_twice,
          "learned positions"),
    Fault("positions_in_every_layer", "positions are added in every layer", "positions_twice",
          _positions_in_every_layer, "learned positions"),
    Fault("rotated_twice", "queries and keys are rotated twice", "positions_twice", _rotated_twice, "rotary positions"),
    Fault("position_offset", "positions begin at 1", "position_offset", _position_offset, "learned positions"),
    Fault("source_padding_in_cross", "cross-attention ignores source padding", "cross_padding",
          _source_padding_in_cross, "encoder-decoder"),
    Fault("untied_copy", "the tied output is a copy", "tying", _untied_copy, "tied decoder"),
    Fault("dropout_left_on", "dropout is on in evaluation", "dropout", _dropout_left_on),
    Fault("softmax_in_fp16", "the softmax is computed in fp16", "softmax_precision", _softmax_in_fp16),
    Fault("mask_after_softmax", "the mask multiplies the weights", "mask_after_softmax", _mask_after_softmax),
    Fault("softmax_over_queries", "the softmax is taken over the queries", "mask_after_softmax", _softmax_over_queries),
    Fault("softmax_over_heads", "the softmax is taken over the heads", "overflow", _softmax_over_heads),
    Fault("softmax_over_rows", "the softmax is taken over the batch", "overflow", _softmax_over_rows),
    Fault("mask_inverted", "the mask hides what comes before", "overflow", _mask_inverted),
    Fault("mask_filled_with_zero", "masked scores are set to 0", "causality", _mask_filled_with_zero),
    Fault("heads_split_without_transpose", "a head is made of whole tokens", "causality",
          _heads_split_without_transpose),
    Fault("heads_merged_without_transpose", "a token is made of pieces of others", "causality",
          _heads_merged_without_transpose),
    Fault("scale_missing", "scores are not divided by sqrt(head size)", "scale", _scale_missing),
    Fault("scale_inverted", "scores are multiplied by sqrt(head size)", "scale", _scale_inverted),
    Fault("one_position_for_all", "all tokens get the first position", "positions", _one_position_for_all,
          "learned positions"),
    Fault("no_residuals", "no sublayer is added to the stream", "gradient_flow", _no_residuals, "sequential decoder"),
    Fault("no_attention_residual", "attention replaces the stream", "gradient_flow", _no_attention_residual,
          "sequential decoder"),
    Fault("no_feedforward_residual", "the feed-forward layer replaces the stream", "gradient_flow",
          _no_feedforward_residual, "sequential decoder"),
    Fault("no_nonlinearity", "the feed-forward layer is two matrices", "gradient_flow", _no_nonlinearity,
          "decoder without gates"),
    Fault("no_norms", "no norm anywhere", "residual_growth", _no_norms),
    Fault("one_block_for_all", "all layers are one block", "tying", _one_block_for_all, "own blocks"),
    Fault("blocks_not_called", "the blocks are built and not run", "gradient_flow", _blocks_not_called),
    Fault("blocks_not_registered", "the blocks are in a plain list", "gradient_flow", _blocks_not_registered),
    Fault("dropout_after_logits", "dropout comes after the output layer", "dropout", _dropout_after_logits),
    Fault("weights_zero", "all weights are zero", "gradient_flow", _weights_zero),
)  # fmt: skip
