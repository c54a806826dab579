"""Collective operations with gradients, for tensor parallelism (Shoeybi et al. 2019).

All processes of a tensor-parallel group hold the same hidden states. Between `enter` and `leave` each computes a part:
some heads, or some units of a feed-forward network. Each is the gradient of the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, of which each process then uses a part; the gradients of the parts are summed."""
    result: Tensor = _Enter.apply(x, group)
    return result


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the parts x that the processes have computed."""
    result: Tensor = _Leave.apply(x, group)
    return result
