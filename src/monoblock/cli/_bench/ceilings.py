"""Measure what the hardware can do at most: the speed of a large matrix product, and of reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ROUNDS = 8


class Ceilings(NamedTuple):
    flops: float  # per second, of a product of two large matrices in the dtype of the model
    bytes: float  # per second, read or copied in memory that is larger than the caches


def measure_ceilings(device: str, dtype: torch.dtype, small: bool = False) -> Ceilings:
    """Measure both on a device; `small` takes sizes that need no time, whose speed says nothing."""
    is_gpu = torch.device(device).type == "cuda"
    size = 64 if small else 8192 if is_gpu else 2048
    flops = 2 * size**3 / best_product_seconds(size, device, dtype)
    count = 1 << (16 if small else 30 if is_gpu else 28)  # numbers of four bytes
    numbers = torch.ones(count, device=device)
    copied = torch.empty_like(numbers)
    read = 4 * count / _best_seconds(numbers.sum, device)
    copy = 8 * count / _best_seconds(lambda: copied.copy_(numbers), device)
    return Ceilings(flops, max(read, copy))


def best_product_seconds(size: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Return the seconds of the fastest of some products of two matrices (size, size)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], Any], device: str) -> float:
    seconds = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished; on a CPU there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
