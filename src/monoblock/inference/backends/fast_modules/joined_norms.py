"""RMS norms of a quantized stack on a GPU that need no kernel of their own: the products around them compute them.

The product before the norm, which also adds the residual, multiplies its output by the weight of the norm and rounds
it to 8 bits; the product after it multiplies its result by the factor of the norm (see kernels/gpu_quantized.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from monoblock.inference.backends.fast_modules.gpu_quantized_linear import (
    FusedQuantizedLinear,
    InferenceQuantizedLinear,
)
from monoblock.inference.backends.fast_modules.inference_modules import (
    InferenceAttention,
    InferenceFeedForward,
    InferenceNorm,
)
from monoblock.kernels.gpu import ACTIVATION_CODES
from monoblock.kernels.gpu_quantized import NextNorm, can_join_norm, has_kernel
from monoblock.nn.block import Block
from monoblock.nn.stack import Stack


class _Sublayer(NamedTuple):
    norm: nn.Module | None  # of its input
    first: object  # what alone reads the normalized input, or None
    last: nn.Module | None  # the layer that computes its output


def join_norms(stack: Stack) -> None:
    """Let the products around each RMS norm of a pre-norm stack compute it, where they can."""
    for before, after in pairwise(_sublayers(stack)):
        norm, first, last = after.norm, after.first, before.last
        if isinstance(norm, InferenceNorm) and isinstance(first, FusedQuantizedLinear) and _has_weight_only(norm):
            is_read = has_kernel(first.joined.get(), stack.config.width)
            if is_read and isinstance(last, InferenceQuantizedLinear) and can_join_norm(last.joined.get()):
                assert norm.weight is not None
                last.next_norm = NextNorm(norm.weight, norm.config.eps)
                norm.unread = torch.full((1,), float("nan"), dtype=last.dtype, device=norm.weight.device)


def _has_weight_only(norm: InferenceNorm) -> bool:
    """Return whether a norm is x / sqrt(mean of x² + eps) times a weight."""
    config = norm.config
    return config.kind == "rms" and not config.unit_offset and norm.weight is not None


def _sublayers(stack: Stack) -> Iterator[_Sublayer]:
    """Return the sublayers of a stack in the order they run; those that do not fit have no norm and no last layer."""
    for block in stack.blocks:
        for name in block.config.sublayers:
            yield _sublayer(block, name)


def _sublayer(block: Block, name: str) -> _Sublayer:
    config, sublayer = block.config, getattr(block, name)
    if config.norm_place != "pre" or config.residual != "sequential":
        return _Sublayer(None, None, None)
    norm = getattr(block, f"{name}_norm")
    if name == "attention" and isinstance(sublayer, InferenceAttention):
        return _Sublayer(norm, sublayer.fused, sublayer.output)
    if name == "feedforward" and isinstance(sublayer, InferenceFeedForward):
        has_activation = sublayer.config.activation in ACTIVATION_CODES
        return _Sublayer(norm, sublayer.fused if has_activation else None, sublayer.down)
    return _Sublayer(None, None, None)
