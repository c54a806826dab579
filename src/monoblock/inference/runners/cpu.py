"""Stacks on a CPU as C++ operators: a decoder that reads and writes keys and values in pages, and an encoder.

    decoder = fuse_stack(model.decoder)                   # a CpuStack, or None if a block is not supported
    if decoder is not None and decoder.supports(x, int(counts.sum())):
        y = decoder.step(
            x,                                            # (R, T, D) fp32: embedded tokens
            lengths, counts,                              # (R,) int64: tokens stored before, and new ones, at most T
            tables,                                       # (R, P) int32: the pages of each row
            keys, values,                                 # a pool (pages, G, 16, K) for each block
            source_keys, source_values,                   # likewise for each block with cross-attention, else ()
            source_tables, source_lengths,                # (R, PS) int32 and (R,) int64, or None
            positions,                                    # (R, T) int64, or None: the number of tokens before
        )                                                 # (R, T, D), zeros behind the new tokens of a row
    encoder = fuse_encoder(model.encoder)                 # a CpuStack, or None
    y = encoder.encode(x, lengths)                        # (R, T, D): texts of these lengths

Token number i of a row lies at `pool[tables[row, i // 16], :, i % 16]`.  A step first writes the keys and values of all
new tokens to the pages in the tables, so no page that is written may be in two rows.  A row with counts 0 does nothing.
Windows and biases go by the number of tokens in between; `positions` are only those of rotary angles.  Padding entries
of a table are never read.  Several threads may call one CpuStack at the same time with different pages.

With `exact=True` the bits of a row do not depend on other rows, nor on how its tokens are divided into steps; otherwise
products of few and of many tokens differ in the last bits.

`torch.ops.monoblock.copy_pages(pools, sources, targets, used)` copies the first used[i] tokens of page sources[i] to
page targets[i] in all pools; the other three are int64 (C,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config.model import Alibi, AttentionConfig, Buckets, Rotary
from monoblock.inference.supported_models import (
    NATIVE_ACTIVATIONS,
    NATIVE_NORMS,
    NATIVE_POSITIONS,
    NATIVE_RESIDUALS,
    SUPPORTED,
    AllowList,
    one_of,
    positive,
    unsupported_field,
)
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.norm import Norm
from monoblock.nn.positions import alibi_bias, relative_position_bucket, rotary_angles, select_kept_heads
from monoblock.nn.stack import Stack
from monoblock.quantization.modules import QuantizedLinear, QuantizedMatrix

MAX_TOKENS = 512  # maximum number of tokens in one step, of all rows together
ENCODER_TOKENS = 128  # tokens of sources that are encoded together, so that they stay in a core's cache
# The weight matrices that the operator uses.  Cross-attention has no key and value here: those are in the cache.
OPERATOR_MATRICES = {
    "attention": ("query", "key", "value", "output"),
    "cross": ("query", "output"),
    "feedforward": ("gate", "up", "down"),
}


STEP_SUPPORTED: AllowList = {
    **SUPPORTED,
    "norm.kind": one_of(*NATIVE_NORMS),
    "residual": one_of(*NATIVE_RESIDUALS),
    "attention.mask": one_of("causal"),
    "attention.global_tokens": one_of(False),
    "attention.random_blocks": one_of(0),
    "attention.qk_norm.kind": one_of(*NATIVE_NORMS),
    "attention.positions.kind": one_of(*NATIVE_POSITIONS),
    "attention.positions.form": one_of("distance"),  # of ALiBi
    "attention.positions.scaling.kind": one_of("linear", "ntk", "yarn", "llama3", "proportional"),
    "cross.mask": one_of("full"),
    **{f"cross.{name}": one_of(None) for name in ("window", "positions", "qk_norm", "softcap", "clip")},
    **{f"cross.{name}": one_of(False) for name in ("global_tokens", "sinks")},
    "cross.random_blocks": one_of(0),
    "feedforward.hidden": positive,
    "feedforward.activation": one_of(*NATIVE_ACTIVATIONS),
    "feedforward.experts": one_of(None),
}

ENCODER_SUPPORTED: AllowList = {
    **STEP_SUPPORTED,
    "cross": one_of(None),
    "attention.mask": one_of("full"),
    "attention.window": one_of(None),
    "attention.positions": one_of(None),
}


def fuse_stack(stack: Stack | None, supported: AllowList = STEP_SUPPORTED) -> CpuStack | None:
    """Build the C++ operator for a stack; return None if it does not support all that a block computes."""
    if stack is None or (stack.config.norm is not None and stack.config.norm.kind not in NATIVE_NORMS):
        return None
    for block in stack.blocks:
        matrices = (
            getattr(getattr(block, part), name, None) for part, own in OPERATOR_MATRICES.items() for name in own
        )
        if not all(isinstance(layer, nn.Linear | QuantizedLinear | None) for layer in matrices):  # LoRA adapters
            return None
        modules = [module for module in block.modules() if not isinstance(module, QuantizedMatrix)]
        tensors = (t for one in modules for t in (*one.parameters(recurse=False), *one.buffers(recurse=False)))
        is_plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        if not is_plain or unsupported_field(block.config, supported) is not None:
            return None
    return CpuStack(stack)


def fuse_encoder(stack: Stack | None) -> CpuStack | None:
    """Build the C++ operator for an encoder; return None if it does not support one of the blocks."""
    return fuse_stack(stack, ENCODER_SUPPORTED)


class CpuStack:
    """The C++ operator that runs all blocks of a decoder, with its position tables."""

    max_tokens = MAX_TOKENS

    def __init__(self, stack: Stack) -> None:
        self.stack, self.position_tables = stack, PositionTables(stack)
        self.native = torch.classes.monoblock.NativeStack(
            width=stack.config.width,
            blocks=[_block_fields(block, self.position_tables) for block in stack.blocks],
            norm=_norm_fields("norm", stack.norm),
        )

    def supports(self, x: Tensor, num_new: int) -> bool:
        """Return whether the operator runs the `num_new` tokens of x (R, T, D), and is fast for so many."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.stack.training:
            return False
        return x.dtype == torch.float32 and x.device.type == "cpu" and num_new <= self.max_tokens

    def step(
        self,
        x: Tensor,
        lengths: Tensor,
        counts: Tensor,
        tables: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        source_keys: Sequence[Tensor] = (),
        source_values: Sequence[Tensor] = (),
        source_tables: Tensor | None = None,
        source_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        exact: bool = False,
        causal: bool = True,
    ) -> Tensor:
        """Run x (R, T, D) through the stack; return (R, T, D)."""
        length = tables.shape[1] * PAGE_SIZE
        if positions is not None and positions.numel():
            length = max(length, int(positions.max()) + 1)
        pools = map(list, (keys, values, source_keys, source_values))
        sources = source_tables, source_lengths
        position_tables = self.position_tables.get(length)
        out: Tensor = self.native.run(
            x, lengths, counts, tables, *pools, *sources, positions, *position_tables, exact, causal
        )
        return out

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Run an encoder on texts x (R, T, D) with these lengths (R,): each token attends to all of its text."""
        out, first, ends = [], 0, lengths.cumsum(0)
        pages = -(-x.shape[1] // PAGE_SIZE)
        while first < len(x):
            before = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(torch.searchsorted(ends, before + ENCODER_TOKENS, right=True)))
            own = lengths[first:end]
            tables = torch.arange(len(own) * pages, dtype=torch.int32).view(-1, pages)
            keys, values = (self._scratch_pools(x, tables.numel(), values=part) for part in (False, True))
            out.append(self.step(x[first:end], torch.zeros_like(own), own, tables, keys, values, causal=False))
            first = end
        return torch.cat(out)

    def _scratch_pools(self, x: Tensor, count: int, *, values: bool) -> list[Tensor]:
        """Return a pool of `count` pages for each block; equal ones share memory, as none reads what another wrote."""
        own = [(block.attention, block.width) for block in self.stack.config.layers()]
        sizes = [one.value_size(width) if values else one.key_size(width) for one, width in own]
        shapes = [(count, one.num_kv_heads, PAGE_SIZE, size) for (one, _), size in zip(own, sizes, strict=True)]
        memory = {shape: x.new_empty(shape) for shape in set(shapes)}
        return [memory[shape] for shape in shapes]


# -- weights and options --------------------------------------------------------------------------------------------


def _block_fields(block: Block, tables: PositionTables) -> dict[str, Any]:
    """Return the options and weights of a block by the names that the C++ operator expects."""
    config = block.config
    attention, cross, feedforward = config.attention, config.cross, config.feedforward
    fields: dict[str, Any] = {
        "norm_place": config.norm_place,
        "residual": config.residual,
        "residual_scale": float(config.residual_scale),
        "activation": feedforward.activation,
        "feedforward.clamp": float(feedforward.clamp or 0.0),
        "attention.heads": attention.heads,
        "attention.kv_heads": attention.num_kv_heads,
        "attention.window": attention.window or 0,
        "attention.scale": _attention_scale(attention, config.width),
        "attention.softcap": float(attention.softcap or 0.0),
        "attention.clip": float(attention.clip or 0.0),
        "attention.qk_norm": None if attention.qk_norm is None else attention.qk_norm_over,
        "attention.sinks": _detach(block.attention.sinks),
        "attention.rotary_table": tables.rotary_index(attention),
        "attention.rotary_interleaved": isinstance(attention.positions, Rotary)
        and attention.positions.layout == "interleaved",
        "attention.bias_table": tables.bias_index(block.attention),
    }
    if cross is not None:
        fields |= {
            "cross.heads": cross.heads,
            "cross.kv_heads": cross.num_kv_heads,
            "cross.scale": _attention_scale(cross, config.width),
        }
    for name in ("query_norm", "key_norm"):
        fields |= _norm_fields(f"attention.{name}", getattr(block.attention, name))
    for sublayer, matrices in OPERATOR_MATRICES.items():
        if getattr(block, sublayer) is None:
            continue
        for norm in (f"{sublayer}_norm", f"{sublayer}_output_norm"):
            fields |= _norm_fields(norm, getattr(block, norm))
        fields[f"{sublayer}_gain"] = _detach(getattr(block, f"{sublayer}_gain"))
        for name in matrices:
            fields |= _matrix_fields(f"{sublayer}.{name}", getattr(getattr(block, sublayer), name))
    return fields


def _attention_scale(config: AttentionConfig, width: int) -> float:
    return config.scale if config.scale is not None else config.key_size(width) ** -0.5


def _detach(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


def _norm_fields(name: str, norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {
        f"{name}.kind": norm.config.kind,
        f"{name}.unit_offset": norm.config.unit_offset,
        f"{name}.eps": float(norm.config.eps),
        f"{name}.weight": _detach(norm.weight),
        f"{name}.bias": _detach(norm.bias),
    }


def _matrix_fields(name: str, layer: Any) -> dict[str, Any]:
    """Return a projection's weight and bias by name and, if it is quantized, the scales and minima of the weight."""
    if layer is None:
        return {}
    fields = {f"{name}.bias": _detach(layer.bias)}
    if not isinstance(layer, QuantizedLinear):
        return fields | {f"{name}.weight": layer.weight.detach()}
    parts = zip(("weight", "scale", "least"), layer.packed_matrix, strict=True)
    fields |= {f"{name}.{part}": t for part, t in parts if t is not None}
    return fields | {f"{name}.activation_bits": layer.activation_bits}


# -- positions ------------------------------------------------------------------------------------------------------


class PositionTables:
    """The position tables of a stack; blocks with the same position scheme share a table.

    `rotary_index` and `bias_index` register a block's position scheme and return its index in the lists that `get`
    returns, or -1 if it has none of the kind.
    """

    def __init__(self, stack: Stack) -> None:
        self.width, self.shared_bias = stack.config.width, stack.position_bias
        self.rotary_configs: list[AttentionConfig] = []
        self.bias_sources: list[tuple[AttentionConfig, nn.Embedding | None]] = []
        # For how many positions there are tables, cosines and sines (length, K/2) of each rotary scheme and, for each
        # bias, its values by distance (H, length) or, for buckets, their indices (length,).
        self.tables: tuple[int, list[Tensor], list[Tensor], list[Tensor]] = (0, [], [], [])

    def rotary_index(self, config: AttentionConfig) -> int:
        return _index(self.rotary_configs, config) if isinstance(config.positions, Rotary) else -1

    def bias_index(self, attention: Attention) -> int:
        table = attention.position_bias if attention.position_bias is not None else self.shared_bias
        return _index(self.bias_sources, (attention.config, table)) if attention.config.has_score_bias else -1

    def get(self, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return three lists of tables for at least `length` positions: rotary cosines, rotary sines, attention biases.

        Cosines and sines have shape (N, K/2) and are indexed by position.  Biases have shape (H, N), are indexed by
        distance, and are computed from the current weights of the model.  N is `length` or more.
        """
        tables = self.tables  # replaced in one assignment, so that several threads may call this at once
        if length > tables[0]:
            with torch.inference_mode(False), torch.no_grad():
                self.tables = tables = self._build(1 << (length - 1).bit_length())
        _, cos, sin, distances = tables
        biases = [
            own if table is None else select_kept_heads(table.weight[own].T[None], config)[0].contiguous()
            for (config, table), own in zip(self.bias_sources, distances, strict=True)
        ]
        return cos, sin, biases

    def _build(self, length: int) -> tuple[int, list[Tensor], list[Tensor], list[Tensor]]:
        positions, distances = torch.arange(length)[None], []
        angles = [
            rotary_angles(config.positions, config.key_size(self.width), positions, torch.float32)  # type: ignore[arg-type]
            for config in self.rotary_configs
        ]
        for config, _ in self.bias_sources:
            if isinstance(config.positions, Buckets):
                own = relative_position_bucket(config.positions, -positions[0], bidirectional=False)
            else:
                assert isinstance(config.positions, Alibi)
                sizes = config.num_unpruned_heads, config.key_size(self.width)
                bias = alibi_bias(config.positions, *sizes, torch.zeros_like(positions[:, :1]), positions)
                own = select_kept_heads(bias, config)[0, :, 0].contiguous()
            distances.append(own)
        cos, sin = [one.cos[0, 0].contiguous() for one in angles], [one.sin[0, 0].contiguous() for one in angles]
        return length, cos, sin, distances


def _index(items: list[Any], item: Any) -> int:
    """Return the index of an item in a list, to which it is added if it is missing."""
    if item not in items:
        items.append(item)
    return items.index(item)
