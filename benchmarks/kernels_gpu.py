"""Microseconds of each kernel of a decoding step on one GPU, and the bytes that it reads per second.

    python benchmarks/kernels_gpu.py --write
    python benchmarks/kernels_gpu.py --only "8 bits"

Each kernel is recorded many times in one CUDA graph, as in a step: with programmatic dependent launch a kernel starts
while the one before still runs. Every launch reads other weights, which together are larger than the L2 cache. The
bytes are those of weights with their scales, or of keys and values. In a step, kernels of different kinds alternate and
take somewhat longer. The shapes are those of GPT-2 124M and of a LLaMA with 7B parameters, for one row or 64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from _report import source, write_section
from torch import Tensor

from monoblock.kernels.gpu import argmax, gated_activation, gated_linear, linear, norm
from monoblock.kernels.gpu_attention import attend_pages, make_counters
from monoblock.kernels.gpu_quantized import GpuQuantizedMatrix, NextNorm, prepare_matrix, quantized_linear
from monoblock.quantization.packing import pack

RESULTS = Path(__file__).with_name("results") / "kernels-h200.md"
WEIGHT_BYTES = 600_000_000  # of all launches of a chain: more than the L2 cache of any GPU
MAX_LAUNCHES, REPLAYS, ROUNDS = 64, 4, 3
LENGTH, CAPACITY = 256, 384  # of the cache
GPT2 = {"query, key and value": (2304, 768), "output": (768, 768), "up": (3072, 768), "down": (768, 3072)}
LLAMA = {
    "query, key, value": (12288, 4096),
    "output": (4096, 4096),
    "gate and up": (22016, 4096),
    "down": (4096, 11008),
}
GROUPS = {8: 64, 4: 128}

Launch = Callable[[], object]


class Kernel(NamedTuple):
    name: str
    num_bytes: int  # read by one launch
    make: Callable[[int], list[Launch]]  # the number of launches -> launches with different weights


def random(*shape: int) -> Tensor:
    return 0.05 * torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def list_kernels() -> Iterator[Kernel]:
    for rows, suffix in ((1, ""), (64, ", 64 rows")):
        for name, (N, K) in GPT2.items():
            yield product(f"GPT-2, {name}{suffix}", rows, N, K)
        yield norm_kernel(f"GPT-2, norm{suffix}", rows, 768, centered=True, quantize=False)
        yield attention(f"GPT-2, attention{suffix}", rows, 12, 64)
        yield best(f"GPT-2, best of 50,257 logits{suffix}", rows, 50257)
    for name, (N, K) in LLAMA.items():
        yield product(f"LLaMA 7B, {name}", 1, N, K)
    yield Kernel("LLaMA 7B, gate, up and activation", 2 * 22016 * 4096, gated)
    for bits in GROUPS:
        for name, (N, K) in LLAMA.items():
            yield quantized_product(f"LLaMA 7B, {name}, {bits} bits", bits, N, K)
    for name in ("output", "down"):
        yield quantized_product(f"LLaMA 7B, {name} and the next norm, 4 bits", 4, *LLAMA[name], has_norm=True)
    for quantize in (False, True):
        suffix = ", rounded to 8 bits" if quantize else ""
        yield norm_kernel(f"LLaMA 7B, norm{suffix}", 1, 4096, centered=False, quantize=quantize)
        yield Kernel(f"LLaMA 7B, activation{suffix}", 2 * 22016, partial(activation, quantize=quantize))
        yield attention(f"LLaMA 7B, attention{suffix}", 1, 32, 128, quantize)


def product(name: str, rows: int, N: int, K: int) -> Kernel:
    def make(count: int) -> list[Launch]:
        x, bias, residual = random(rows, 1, K), random(N), random(rows, 1, N)
        weights = [random(N, K) for _ in range(count)]
        return [partial(linear, x, weight, bias, residual) for weight in weights]

    return Kernel(name, 2 * N * K, make)


def gated(count: int) -> list[Launch]:
    x, weights = random(1, 1, 4096), [random(22016, 4096) for _ in range(count)]
    return [partial(gated_linear, x, weight, "silu") for weight in weights]


def quantized_product(name: str, bits: int, N: int, K: int, *, has_norm: bool = False) -> Kernel:
    def make(count: int) -> list[Launch]:
        x, residual = random(1, 1, K), random(1, 1, N)
        x = norm(x, None, None, 1e-5, centered=False, cast_after_scale=False, quantize=True)  # with its 8-bit form
        one = prepare_matrix(*pack(random(N, K), bits, GROUPS[bits]))
        matrices = [GpuQuantizedMatrix(one.packed.clone(), one.scales.clone(), bits) for _ in range(count)]
        next_norm = NextNorm(random(N), 1e-5) if has_norm else None
        return [partial(quantized_linear, x, matrix, None, residual, next_norm=next_norm) for matrix in matrices]

    scale_bytes = N * K // GROUPS[bits] * (2 if bits == 8 else 4)
    return Kernel(name, N * K * bits // 8 + scale_bytes, make)


def norm_kernel(name: str, rows: int, K: int, *, centered: bool, quantize: bool) -> Kernel:
    def make(count: int) -> list[Launch]:
        weight, bias = random(K), random(K) if centered else None
        options = {"centered": centered, "cast_after_scale": centered, "quantize": quantize}
        inputs = [random(rows, 1, K) for _ in range(count)]
        return [partial(norm, x, weight, bias, 1e-5, **options) for x in inputs]

    return Kernel(name, 2 * rows * K, make)


def activation(count: int, quantize: bool) -> list[Launch]:
    inputs = [random(1, 1, 22016) for _ in range(count)]
    return [partial(gated_activation, x, "silu", quantize=quantize) for x in inputs]


def best(name: str, rows: int, V: int) -> Kernel:
    def make(count: int) -> list[Launch]:
        inputs = [random(rows, V) for _ in range(count)]
        return [partial(argmax, x) for x in inputs]

    return Kernel(name, 2 * rows * V, make)


def attention(name: str, rows: int, heads: int, size: int, quantize: bool = False) -> Kernel:
    def make(count: int) -> list[Launch]:
        q, k, v = (random(rows, heads, 1, size) for _ in range(3))
        tables = torch.arange(rows * CAPACITY // 16, device="cuda", dtype=torch.int32).view(rows, -1)
        caches = [tuple(random(tables.numel(), heads, 16, size) for _ in range(2)) for _ in range(count)]
        lengths, counts = (torch.full((rows,), value, device="cuda") for value in (LENGTH, 1))
        finished = make_counters(rows * heads, lengths.device)
        run = partial(attend_pages, scale=None, quantize=quantize, finished=finished)
        return [partial(run, q, k, v, keys, values, tables, lengths, counts) for keys, values in caches]

    return Kernel(name, 4 * rows * heads * LENGTH * size, make)


def measure(kernel: Kernel) -> float:
    """Return the microseconds of one launch: the best round of replays of the recorded chain."""
    launches = kernel.make(max(4, min(MAX_LAUNCHES, WEIGHT_BYTES // kernel.num_bytes)))
    with torch.inference_mode():
        for launch in launches:  # compiles the kernel; attention prepares its counters
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e6 * min(seconds[1:]) / (REPLAYS * len(launches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the kernels whose name contains this text")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    parser.add_argument("--smoke", action="store_true", help="list the kernels; measure them if there is a GPU")
    args = parser.parse_args()
    kernels = [kernel for kernel in list_kernels() if args.only in kernel.name]
    if not torch.cuda.is_available():
        if not args.smoke:
            sys.exit("there is no GPU")
        print(f"skipped: there is no GPU for {len(kernels)} kernels")
        return
    lines = ["| kernel | µs | TB/s |", "|---|---|---|"]
    for kernel in kernels:
        microseconds = measure(kernel)
        lines.append(f"| {kernel.name} | {microseconds:.2f} | {kernel.num_bytes / microseconds / 1e6:.2f} |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    if args.write:
        about = f"{source()}."
        write_section(RESULTS, "Kernels of a decoding step", "\n\n".join(["Kernels", about, "\n".join(lines)]))


if __name__ == "__main__":
    main()
