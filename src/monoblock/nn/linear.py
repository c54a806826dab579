"""Apply linear layers: one with the fastest product, or several to the same input as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monoblock.kernels.cpu import autograd as cpu
from monoblock.kernels.fp8_linear import fp8_linear, supports_fp8
from monoblock.nn.modules.hooks import is_plain

FUSE_MIN_TOKENS = 512  # with fewer, concatenating the weights costs more than one wide product saves


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a layer to x (…, D); the product of a plain (see `is_plain`) linear layer in training may use a kernel."""
    if x.requires_grad and is_plain(layer, nn.Linear):
        return linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]
    out: Tensor = layer(x)
    return out


def should_fuse(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Return whether applying the layers to x (B, T, D) as one product is possible and faster.

    It is if x has many tokens and the layers are plain (see `is_plain`) linear layers that can be joined.  A layer with
    `keeps_no_copy` is not: the concatenated weights would be kept until the backward pass.
    """
    return (
        x.shape[0] * x.shape[1] >= FUSE_MIN_TOKENS
        and not any(getattr(layer, "keeps_no_copy", False) for layer in layers)
        and all(is_plain(layer, nn.Linear) for layer in layers)
        and can_join(layers)
    )


def fused_linear(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply every layer to x (B, T, D) with one matrix product; return the output of each layer."""
    return cpu.split_columns(linear(x, *join_weights(layers)), [layer.out_features for layer in layers])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear(x, weight, bias) with the fastest product for this device and precision."""
    return fp8_linear(x, weight, bias) if supports_fp8(x, weight) else cpu.linear(x, weight, bias)


def can_join(layers: Sequence[nn.Module | None]) -> bool:
    """Return whether all layers are linear, and either all of them or none have a bias."""
    has_bias = {layer.bias is not None for layer in layers if isinstance(layer, nn.Linear)}
    return all(isinstance(layer, nn.Linear) for layer in layers) and len(has_bias) == 1


def join_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights, and the biases if there are any, of layers with the same input."""
    weight = torch.cat([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
