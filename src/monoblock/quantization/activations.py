"""Round activations to 8 bits, with one step for each group of inputs that shares a scale of the weight.

    x = step n     n from -127 to 127, step = max |x| / 127 of the group

The C++ kernels of kernels/cpu round with the same floating-point operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 127  # the largest integer
SMALLEST = 1e-30  # groups whose largest |x| is not above this become zeros


def round_activations(x: Tensor, group: int) -> Tensor:
    """Return x (…, inputs) rounded to 8 bits; the last group may have fewer inputs.

    A group with an infinity or a NaN becomes NaN.  The gradient passes through unchanged.
    """
    return _RoundActivations.apply(x, group)


class _RoundActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        groups = F.pad(wide, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
        largest = groups.abs().amax(-1, keepdim=True)
        scale = torch.full_like(largest, LIMIT) / largest  # torch computes LIMIT / largest as LIMIT (1 / largest)
        integers = (groups * torch.where(largest > SMALLEST, scale, 0.0)).round()
        rounded = integers * (largest / LIMIT)
        return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
