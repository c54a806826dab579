"""The position encoding of a model as a table of vectors, or as a bias by distance."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from monoblock.config.model import Learned, Rotary, Sinusoid
from monoblock.nn.embedding import Embedding, PatchEmbedding
from monoblock.nn.positions import rotary_frequencies, score_bias, sinusoid
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer


class PositionTable(NamedTuple):
    """Vectors (T, D) of positions, or biases (H, offsets) on attention scores by key position - query position."""

    kind: str  # "sinusoid", "learned", "rotary", "alibi" or "buckets"
    title: str
    vectors: Tensor | None = None
    frequencies: Tensor | None = None  # (pairs,) angle per position in radians, if the scheme rotates
    bias: Tensor | None = None
    offsets: Tensor | None = None  # (offsets,) of the bias


@torch.no_grad()
def position_tables(model: Transformer, length: int) -> list[PositionTable]:
    """Return every position encoding of a model, for positions 0 to length - 1."""
    tables = [_input_table(model, length)]
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is not None:
            for config in dict.fromkeys(block.attention.positions for block in stack.config.layers()):
                layer = next(n for n, block in enumerate(stack.config.layers()) if block.attention.positions == config)
                tables.append(_attention_table(model, name, layer, length))
    return [table for table in tables if table is not None]


def _input_table(model: Transformer, length: int) -> PositionTable | None:
    embedding = model.input
    if isinstance(embedding, PatchEmbedding):
        vectors = embedding.position_table().detach().float().cpu()
        return PositionTable("learned", "positions of image patches, row by row", vectors)
    if not isinstance(embedding, Embedding):
        return None
    config = embedding.config.positions
    if isinstance(config, Learned) and embedding.position is not None:
        rows = torch.arange(min(length, embedding.config.context or length), device=model.device) + config.offset
        return PositionTable("learned", "learned positions", embedding.position(rows).float().cpu())
    if isinstance(config, Sinusoid):
        vectors = sinusoid(torch.arange(length), model.config.width, config)
        half = (model.config.width + 1) // 2
        spread = max(half - 1, 1) if config.form == "fairseq" else model.config.width / 2
        frequencies = config.base ** -(torch.arange(half) / spread)
        return PositionTable("sinusoid", "sinusoidal positions", vectors, frequencies)
    return None


def _attention_table(model: Transformer, stack: str, layer: int, length: int) -> PositionTable | None:
    module = cast(Stack, model.get_submodule(stack))
    block = module.blocks[layer]
    attention = block.config.attention
    config, size = attention.positions, attention.key_size(model.config.width)
    positions = torch.arange(length)
    if isinstance(config, Rotary):
        frequencies, _ = rotary_frequencies(config, size, positions[None])
        frequencies = frequencies.flatten()[: size // 2].cpu()
        angles = positions[:, None] * frequencies
        vectors = torch.cat((angles.cos(), angles.sin()), -1)
        return PositionTable("rotary", f"rotary angles of the {stack}: cosines, then sines", vectors, frequencies)
    query, keys = torch.tensor([[length - 1]]), torch.arange(2 * length - 1)[None]
    offsets = keys[0] - (length - 1)
    is_causal = attention.mask != "full"
    if config is None or not attention.has_score_bias:
        return None
    is_shared = attention.table_rows(shared=True) > 0
    embedding = module.position_bias if is_shared else block.attention.position_bias
    table = None if embedding is None else embedding.weight.float().cpu().__getitem__
    kind = config.kind if table is None else "learned"
    title = f"{kind} bias by distance of the {stack}" + ("" if table is None or is_shared else f", layer {layer}")
    bias = score_bias(replace(attention, kept_heads=()), size, query, keys, table)[0, :, 0]
    if is_causal:
        bias, offsets = bias[:, :length], offsets[:length]
    return PositionTable(config.kind, title, bias=bias.float(), offsets=offsets)
