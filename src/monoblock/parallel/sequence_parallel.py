"""Divide the positions of a sequence among tensor-parallel processes, between attention and feed-forward layers.

Norms, residual connections and dropout treat every position alone, so each process computes them for some positions
only, and stores the activations of these only (Korthikanti et al. 2022). Before attention and feed-forward layers, the
processes gather all positions; after them, the sum of their parts is scattered. Together this sends as much as the
all-reduce of tensor parallelism alone.

Positions are divided only while gradients are computed. The number of positions is padded to a multiple of the number
of processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.nn.attention import AttentionContext
from monoblock.parallel.collectives import exchange


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, n · T, D) of all n processes, each of which has x (B, T, D)."""
    n = dist.get_world_size(group)
    parts = x.new_empty((n * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, T, D) of this process of the sum of x (B, n · T, D) over all n processes."""
    n = dist.get_world_size(group)
    parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own


def _select(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the positions (B, T, D) of this process of x (B, n · T, D)."""
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class DividedPositions:
    """The positions of the blocks of a model, divided among the processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.length = 0  # positions of the sequence that a block runs on

    @property
    def is_active(self) -> bool:
        return torch.is_grad_enabled()

    # Each is a function of x with all positions (B, T, D) or with those of this process, padded (B, ceil(T / n), D).

    def gather_for_parts(self, x: Tensor) -> Tensor:
        """Gather all positions, of which each process then computes a part; the gradients of the parts are summed."""
        return exchange(x, self.group, _gather, _scatter_sum)[:, : self.length]

    def gather_for_all(self, x: Tensor) -> Tensor:
        """Gather all positions, with which every process then computes the same."""
        return exchange(x, self.group, _gather, _select)[:, : self.length]

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Sum what the processes have computed for all positions, and return the positions of this process."""
        return exchange(self._pad(x), self.group, _scatter_sum, _gather)

    def select(self, x: Tensor) -> Tensor:
        """Return the positions of this process of x, which every process has."""
        return exchange(self._pad(x), self.group, _select, _gather)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.size))

    # -- hooks --------------------------------------------------------------------------------------------------------

    def divide_stack(self, stack: nn.Module) -> None:
        """Let a stack run on the positions of this process, and return all of them."""

        def divide(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            self.length = args[0].shape[1]
            return ((self.select(args[0]), *args[1:]) if self.is_active else args), options

        stack.register_forward_pre_hook(divide, with_kwargs=True)
        stack.register_forward_hook(lambda module, args, out: self.gather_for_all(out) if self.is_active else out)

    def follow_block(self, block: nn.Module) -> None:
        """Remember how many positions a block runs on, also when it is run again in the backward pass."""

        def remember(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            context: AttentionContext = args[1]
            self.length = context.resolved_mask.q.length

        block.register_forward_pre_hook(remember, with_kwargs=True)

    def gather_around(self, module: nn.Module) -> None:
        """Let a module that every process computes run on all positions."""

        def gather(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return ((self.gather_for_all(args[0]), *args[1:]) if self.is_active else args), options

        module.register_forward_pre_hook(gather, with_kwargs=True)
        module.register_forward_hook(lambda module, args, out: self.select(out) if self.is_active else out)
