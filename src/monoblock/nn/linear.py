"""Several linear layers of one input as one product: the weights are stored apart and joined where that is faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels.cpu.autograd import split_columns
from monoblock.nn.module_hooks import is_plain

FUSE_MIN_TOKENS = 512  # from here one wide product is faster, although the weights are concatenated first


def should_fuse(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether x (B, T, D) has many tokens and the layers are plain and all or none have a bias."""
    if x.shape[0] * x.shape[1] < FUSE_MIN_TOKENS or not all(is_plain(layer, nn.Linear) for layer in layers):
        return False
    return len({layer.bias is None for layer in layers}) == 1


def fused_linear(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """The outputs of each layer for x (B, T, D)."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return split_columns(F.linear(x, weight, bias), [layer.out_features for layer in layers])
