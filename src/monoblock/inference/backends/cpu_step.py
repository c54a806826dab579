"""A decoding step on a CPU: run a few tokens through the whole decoder in one C++ operator.

A step has one token per row, or several when speculative decoding checks proposed tokens.  What the operator does not
support (experts, prefixes, packed documents, many rows, gradients) runs in the PyTorch modules of `nn/`.  Both use the
same cache, so each step may run in either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config.model import AttentionConfig, Rotary
from monoblock.inference.backends.cpu_position_tables import PositionTables
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
from monoblock.nn.block import Block
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.kv_cache.cache_index import CacheIndex
from monoblock.nn.norm import Norm
from monoblock.nn.stack import Stack
from monoblock.nn.token_positions import TokenPositions
from monoblock.quantization.cpu_linear import KernelLinear

MAX_TOKENS = 8  # maximum number of tokens in one call, of all rows together
MAX_PROMPT_TOKENS = 128  # the same for quantized weights, whose products with many rows the operator computes as well
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


def fuse_stack(stack: Stack) -> FusedStack | None:
    """Build the C++ operator for a stack; return None if it does not support one of the blocks."""
    return FusedStack(stack) if can_fuse(stack) else None


def can_fuse(stack: Stack) -> bool:
    """Return whether the C++ operator supports all blocks of a stack."""
    has_native_norm = stack.config.norm is None or stack.config.norm.kind in NATIVE_NORMS
    return has_native_norm and all(supports_block(block) for block in stack.blocks)


def supports_block(block: Block) -> bool:
    """Return whether the C++ operator supports everything that a block computes."""
    if unsupported_field(block.config, STEP_SUPPORTED) is not None:
        return False
    return has_plain_matrices(block) and all(has_readable_weights(module) for module in block.modules())


def has_plain_matrices(block: Block) -> bool:
    """Return whether all projections that the C++ operator uses are plain linear layers, without a LoRA adapter."""
    layers = (getattr(getattr(block, part), name, None) for part, names in OPERATOR_MATRICES.items() for name in names)
    return all(layer is None or isinstance(layer, (nn.Linear, KernelLinear)) for layer in layers)


def has_readable_weights(module: nn.Module) -> bool:
    """Return whether the C++ operator supports the dtype and layout of a module's own weights."""
    if isinstance(module, KernelLinear):
        return module.tensors[0].dtype != torch.bfloat16
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(is_plain_fp32(t) for t in tensors)


def is_plain_fp32(t: Tensor) -> bool:
    """Return whether a tensor is fp32, on the CPU and contiguous, so that C++ code can use it directly."""
    return t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()


class FusedStack:
    """The C++ operator that runs all blocks of a stack, with its position tables."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.position_tables = stack, PositionTables(stack)
        self.has_cross = stack.blocks[0].cross is not None
        self.native_stack = torch.classes.monoblock.NativeStack(
            width=stack.config.width,
            blocks=[self._block_fields(block) for block in stack.blocks],
            norm=_norm_fields("norm", stack.norm),
        )
        self.max_tokens = MAX_PROMPT_TOKENS if self.native_stack.supports_prompts() else MAX_TOKENS

    def _block_fields(self, block: Block) -> dict[str, Any]:
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
            "attention.rotary_table": self.position_tables.rotary_index(attention),
            "attention.rotary_interleaved": isinstance(attention.positions, Rotary)
            and attention.positions.layout == "interleaved",
            "attention.bias_table": self.position_tables.bias_index(block.attention),
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

    def supports_pass(self, x: Tensor, token_positions: TokenPositions, cache: Cache) -> bool:
        """Return whether the C++ operator supports a pass of x (B, T, D).

        It supports at most `max_tokens` tokens in fp32, without gradients, with a cache that has room for them.  More
        than MAX_TOKENS may not have padding; fewer need a cache that is not empty.
        """
        count = x.shape[0] * x.shape[1]
        is_small = count <= self.max_tokens and x.dtype == torch.float32 and x.device.type == "cpu"
        if not is_small or self.stack.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if cache.is_static or cache.max_length + x.shape[1] > cache.capacity:
            return False
        tokens: list[TokenPositions | CacheIndex] = [token_positions, *cache.index_by_capacity.values()]
        for positions in tokens:
            if positions.document is not None or positions.prefix_or_global is not None:
                return False
        is_prompt = count > MAX_TOKENS
        if is_prompt and token_positions.valid is not None:
            return False
        layers: list[Any] = [*(() if is_prompt else cache.layers), *(cache.cross_layers if self.has_cross else ())]
        return all(layer.keys is not None for layer in layers)

    def __call__(
        self, x: Tensor, token_positions: TokenPositions, memory_positions: TokenPositions | None, cache: Cache
    ) -> Tensor | None:
        """Run x (B, T, D) through the stack; return (B, T, D), or None if the C++ operator does not support it."""
        indices, valid = cache.index_by_capacity.values(), token_positions.valid
        if valid is not None and not torch.equal(valid, valid[:, :1].expand_as(valid)):
            return None  # the operator supports rows that are not active, but no padding within a row
        for layer, block in zip(cache.layers, self.stack.config.layers(), strict=True):
            layer.allocate(x, block.attention, block.width)
        sources = [layer for layer in cache.cross_layers if layer is not None]
        source_mask = None if memory_positions is None else memory_positions.valid
        rotary_cos, rotary_sin, biases = self.position_tables.get(cache.capacity)
        out: Tensor | None = self.native_stack.step(
            x=x,
            positions=token_positions.positions,
            lengths=cache.lengths,
            active=None if valid is None else valid[:, 0].expand(x.shape[0]).contiguous(),
            written=cache.max_written,
            keys=[layer.keys for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
            source_keys=[layer.keys for layer in sources],
            source_values=[layer.values for layer in sources],
            source_mask=None if source_mask is None else source_mask.contiguous(),
            cache_positions=[index.positions for index in indices],
            cache_index=[index.token_index for index in indices],
            windows=[index.window or 0 for index in indices],
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            position_biases=biases,
        )
        return out


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
    tensors = layer.tensors if isinstance(layer, KernelLinear) else (layer.weight,)
    parts = zip(("weight", "scale", "least"), tensors, strict=False)
    fields = {f"{name}.{part}": t.detach() for part, t in parts} | {f"{name}.bias": _detach(layer.bias)}
    return fields | ({f"{name}.activation_bits": layer.activation_bits} if len(tensors) > 1 else {})
