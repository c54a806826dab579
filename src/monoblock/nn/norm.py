"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import NormConfig

HALF_DTYPES = (torch.float16, torch.bfloat16)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over the last axis.

    The statistics of 16-bit input are computed in fp32.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, cast_after_scale: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis.

    16-bit input is squared in fp32, since squares overflow fp16.  Published models differ in whether the result is cast
    back to 16 bits before or after it is multiplied by the weight, which `cast_after_scale` selects.
    """
    if x.dtype not in HALF_DTYPES:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    return (wide * weight.float()).to(x.dtype) if cast_after_scale else wide.to(x.dtype) * weight.to(x.dtype)


class Norm(nn.Module):
    """Layer norm or RMS norm over the last axis; if `shape` is (heads, size), each head has its own weights."""

    def __init__(self, shape: int | tuple[int, ...], config: NormConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(shape)) if config.affine != "none" else None
        self.bias = nn.Parameter(torch.empty(shape)) if config.affine == "scale_shift" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one and the shift to zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.config.unit_offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        weight: Tensor | None = self.weight
        if weight is not None and config.unit_offset:
            weight = 1 + weight.float() if x.dtype in HALF_DTYPES else 1 + weight
        if weight is not None and weight.dim() > 1:
            return self._norm_per_head(x, weight)
        if config.kind == "layer":
            if weight is not None:
                weight = weight.to(x.dtype)
            return layer_norm(x, weight, self.bias, config.eps)
        return rms_norm(x, weight, config.eps, cast_after_scale=config.cast == "after_scale")

    def _norm_per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize each head of x (B, T, H, K) and scale it by its row of weight (H, K)."""
        normed = layer_norm(x, eps=self.config.eps) if self.config.kind == "layer" else rms_norm(x, eps=self.config.eps)
        normed = normed * weight.to(x.dtype)
        return normed if self.bias is None else normed + self.bias
