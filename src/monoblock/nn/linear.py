"""Compute several linear layers of the same input as one product, joining their weights where that is faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels.cpu.autograd import split_columns
from monoblock.nn.module_hooks import is_plain

FUSE_MIN_TOKENS = 512  # from here one wide product is faster, although the weights are concatenated first


def should_fuse(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether one product is possible and faster: x (B, T, D) has many tokens; layers are plain and can be joined."""
    return (
        x.shape[0] * x.shape[1] >= FUSE_MIN_TOKENS
        and all(is_plain(layer, nn.Linear) for layer in layers)
        and can_join(layers)
    )


def fused_linear(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Apply every layer to x (B, T, D) with one product; return the output of each."""
    return split_columns(F.linear(x, *join_weights(layers)), [layer.out_features for layer in layers])


def can_join(layers: Sequence[nn.Module | None]) -> bool:
    """Whether all layers are linear, and all or none have a bias."""
    has_bias = {layer.bias is not None for layer in layers if isinstance(layer, nn.Linear)}
    return all(isinstance(layer, nn.Linear) for layer in layers) and len(has_bias) == 1


def join_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights (ΣN, K) and the biases (ΣN,) of layers with the same input."""
    weight = torch.cat([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
