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

from monoblock.decoding.backends.inference.gpu_quantized_linear import FusedQuantizedLinear, InferenceQuantizedLinear
from monoblock.decoding.backends.inference.inference_modules import (
    InferenceAttention,
    InferenceFeedForward,
    InferenceNorm,
)
from monoblock.kernels.gpu import ACTIVATION_CODES
from monoblock.kernels.gpu_quantized import NextNorm
from monoblock.nn.block import Block
from monoblock.nn.stack import Stack


class _Sublayer(NamedTuple):
    norm: nn.Module | None  # of its input
    reads_rounded: bool  # whether quantized products alone read the normalized input
    last: nn.Module | None  # the layer that computes its output


def join_norms(stack: Stack) -> None:
    """Let the products around each RMS norm of a pre-norm stack compute it, where they can."""
    for before, after in pairwise(_sublayers(stack)):
        norm, last = after.norm, before.last
        if not (isinstance(norm, InferenceNorm) and isinstance(last, InferenceQuantizedLinear)):
            continue
        config, weight = norm.config, norm.weight
        if after.reads_rounded and config.kind == "rms" and not config.unit_offset and weight is not None:
            last.next_norm = NextNorm(weight, config.eps)
            norm.unread = torch.full((1,), float("nan"), dtype=last.dtype, device=weight.device)


def _sublayers(stack: Stack) -> Iterator[_Sublayer]:
    """Return the sublayers of a stack in the order they run; those that do not fit have no norm and no last layer."""
    for block in stack.blocks:
        for name in block.config.sublayers:
            yield _sublayer(block, name)


def _sublayer(block: Block, name: str) -> _Sublayer:
    config, sublayer = block.config, getattr(block, name)
    if config.norm_place != "pre" or config.residual != "sequential":
        return _Sublayer(None, False, None)
    is_fused = isinstance(getattr(sublayer, "fused", None), FusedQuantizedLinear)
    norm = getattr(block, f"{name}_norm")
    if name == "attention" and isinstance(sublayer, InferenceAttention):
        return _Sublayer(norm, is_fused, sublayer.output)
    if name == "feedforward" and isinstance(sublayer, InferenceFeedForward):
        return _Sublayer(norm, is_fused and sublayer.config.activation in ACTIVATION_CODES, sublayer.down)
    return _Sublayer(None, False, None)
