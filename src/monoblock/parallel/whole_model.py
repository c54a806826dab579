"""Use the whole model in the main process, while the other processes wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from monoblock.parallel.gather import free_memory
from monoblock.parallel.strategy import Strategy

T = TypeVar("T")
MEMORY_MARGIN = 1.25  # memory to generate with a whole model, relative to that of its weights


def has_room(strategy: Strategy, device: torch.device) -> bool:
    """Return whether the whole model fits on the device of the main process; every process must call this."""
    if not strategy.is_sharded:
        return True
    needed = MEMORY_MARGIN * strategy.split_bytes
    return bool(strategy.world.broadcast(device.type != "cuda" or needed < free_memory(device)))


def call_with_whole_model(
    strategy: Strategy, model: nn.Module, device: torch.device, function: Callable[[nn.Module], T], otherwise: T
) -> T | None:
    """Return what a function of the whole model returns in the main process, and None in the others.

    Every process must call this. The time that the function takes does not count against the time-out.

    device: where the whole model is put; its weights may be split among the processes.
    otherwise: what to return if it does not fit there.
    """
    world = strategy.world
    if not has_room(strategy, device):
        return otherwise if world.is_main else None
    whole, result = strategy.whole_model(model), None
    with world.long_work():
        if whole is not None:
            result = function(whole.to(device))
    return result
