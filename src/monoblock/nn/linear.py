"""Linear layers with the fastest matrix product for their device and precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monoblock.kernels.cpu import autograd as cpu
from monoblock.kernels.fp8_linear import fp8_linear, supports_fp8


class Linear(nn.Linear):
    """nn.Linear; in training, its product is computed in 8 bits or with a kernel where that is chosen or faster."""

    uses_fp8 = False  # in training under autocast to bfloat16, multiply in 8 bits if the sizes allow it

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return super().forward(x)
        multiply = fp8_linear if self.uses_fp8 and supports_fp8(x, self.weight) else cpu.linear
        return multiply(x, self.weight, self.bias)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of x are computed."""
    kind = x.device.type
    is_lowered = kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_lowered else x.dtype


def can_join(layers: Sequence[nn.Module | None]) -> bool:
    """Return whether all layers are linear, and either all of them or none have a bias."""
    has_bias = {layer.bias is not None for layer in layers if isinstance(layer, nn.Linear)}
    return all(isinstance(layer, nn.Linear) for layer in layers) and len(has_bias) == 1
