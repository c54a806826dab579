"""Measure the time of a function and the memory it needs, on a CPU or a GPU.

On a CPU the time is that of the processor, summed over threads, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def best_seconds(function: Callable[[], object], rounds: int, device: str) -> float:
    """Return the shortest time of several calls, after one that warms up."""
    function()
    best = float("inf")
    for _ in range(rounds):
        start = read_clock(device)
        function()
        best = min(best, read_clock(device) - start)
    return best


def read_clock(device: str) -> float:
    """Return the elapsed seconds on a GPU, after all work there is done, and the processor seconds on a CPU."""
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(function: Callable[[], object], device: str) -> int | None:
    """Return the largest number of bytes that a call allocates on a GPU beyond what there was; None on a CPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(function: Callable[[], object]) -> int:
    """Return the bytes of all tensors that a forward pass keeps for its backward pass, each storage once."""
    seen: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(seen.values())
