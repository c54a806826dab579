"""Collective operations with gradients, for tensor parallelism (Shoeybi et al. 2019).

All processes of a tensor-parallel group hold the same hidden states. Between `enter` and `leave` each computes a part:
some heads, or some units of a feed-forward network. Each is the gradient of the other.

`exchange` makes such operations from a pair of functions of a tensor and a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.collective = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.collective(grad, ctx.group), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    """Return forward(x, group), whose gradient is backward(gradient, group)."""
    result: Tensor = _Exchange.apply(x, group, forward, backward)
    return result


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, of which each process then uses a part; the gradients of the parts are summed."""
    return exchange(x, group, _same, _sum)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the parts x that the processes have computed."""
    return exchange(x, group, _sum, _same)


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
