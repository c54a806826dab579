"""LayerNorm (Ba et al. 2016), RMSNorm (Zhang and Sennrich 2019) and BatchNorm (Ioffe and Szegedy 2015)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from monoblock.config.model import NormConfig

HALF_DTYPES = (torch.float16, torch.bfloat16)
MOMENTUM = 0.1  # the part of the running statistics of a batch norm that each training batch replaces


def layer_norm(
    x: Float[Tensor, "*places D"],
    weight: Float[Tensor, " D"] | None = None,
    bias: Float[Tensor, " D"] | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "*places D"]:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance over the last axis.

    The statistics of 16-bit input are computed in fp32.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(
    x: Float[Tensor, "*places D"],
    weight: Float[Tensor, " D"] | None = None,
    eps: float = 1e-6,
    *,
    cast_after_scale: bool = False,
) -> Float[Tensor, "*places D"]:
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
    """A norm over the last axis; if `shape` is (heads, size), each head has its own weights.

    A batch norm computes mean and variance of each feature over all rows and positions of a training batch.  Padding is
    not left out, so it changes the statistics, and with them the output for every token.  Evaluation uses running
    averages of these statistics, which are stored with the weights but not trained.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    updates_statistics = True  # False while a block is recomputed: its batch has been counted already

    def __init__(self, shape: int | tuple[int, ...], config: NormConfig) -> None:
        super().__init__()
        self.config = config
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(shape) if config.row.has_running_statistics else None)
        self.weight = nn.Parameter(torch.empty(shape)) if config.affine != "none" else None
        self.bias = nn.Parameter(torch.empty(shape)) if config.affine == "scale_shift" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set scale and running variance to one, shift and running mean to zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.config.unit_offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.running_mean is not None and self.running_var is not None:
            nn.init.zeros_(self.running_mean)
            nn.init.ones_(self.running_var)

    def forward(self, x: Float[Tensor, "*places size"]) -> Float[Tensor, "*places size"]:
        config = self.config
        if config.kind == "none":
            return x
        weight: Tensor | None = self.weight
        if weight is not None and config.unit_offset:
            weight = 1 + weight.float() if x.dtype in HALF_DTYPES else 1 + weight
        if self.running_mean is not None:
            return self._batch_norm(x, weight)
        if weight is not None and weight.dim() > 1:
            return self._norm_per_head(x, weight)
        return self._normalize(x, weight, self.bias)

    def _normalize(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        match self.config.kind:
            case "layer":
                weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
                return layer_norm(x, weight, bias, self.config.eps)
            case "rms":
                return rms_norm(x, weight, self.config.eps, cast_after_scale=self.config.cast == "after_scale")
        raise NotImplementedError(f"norm {self.config.kind!r}")

    def _batch_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalize each feature with the statistics of this batch or, in evaluation, with the running statistics."""
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, variance = self.running_mean.flatten(), self.running_var.flatten()
        if not self.updates_statistics:
            mean, variance = mean.clone(), variance.clone()
        scale = None if weight is None else weight.to(self.running_mean.dtype).flatten()
        shift = None if self.bias is None else self.bias.flatten()
        features = x.reshape(-1, self.running_mean.numel())  # (B · T, D)
        out = F.batch_norm(features, mean, variance, scale, shift, self.training, MOMENTUM, self.config.eps)
        return out.to(x.dtype).view(x.shape)

    def _norm_per_head(self, x: Float[Tensor, "B T H K"], weight: Float[Tensor, "H K"]) -> Float[Tensor, "B T H K"]:
        """Normalize each head of x and scale it by its row of weight."""
        normed = self._normalize(x) * weight.to(x.dtype)
        return normed if self.bias is None else normed + self.bias


def has_statistics(module: nn.Module) -> bool:
    """Return whether there is a batch norm in a module."""
    return any(part.running_mean is not None for part in module.modules() if isinstance(part, Norm))


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Keep the running statistics of all batch norms in a module as they are, while its forward pass is repeated."""
    norms = [part for part in module.modules() if isinstance(part, Norm)]
    for norm in norms:
        norm.updates_statistics = False
    try:
        yield
    finally:
        for norm in norms:
            norm.updates_statistics = True
