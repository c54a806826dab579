"""Several linear layers of one input as one product: stored apart, where that is legible, and joined where it pays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.native.gradients import split

JOIN_FROM = 512  # tokens: from there one wide product is faster, though the weights are first put together


def worth_joining(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Many tokens, and ordinary layers that all have a bias or none."""
    plain = all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1
    return plain and x.shape[0] * x.shape[1] >= JOIN_FROM


def joined(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """What each layer makes of x (B, T, D)."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return split(F.linear(x, weight, bias), [layer.out_features for layer in layers])
