"""Time and peak memory of one attention layer, forward and backward: full causal attention beside sparse attention.

The patterns are a causal window of 128 (Beltagy et al. 2020), the same with a global token, and with a global token and
three random blocks (Zaheer et al. 2020), at 4,096 to 32,768 tokens on a CPU and to 131,072 on a GPU. The lengths of a
pattern run in turn, several times, and the best time of each counts. The peak memory of each is that of a process (on a
GPU: of allocated memory) above the state before layer and input were made, after a short text has run. The last column
is the time divided by that of half the length. On a CPU that others use, --cpu-time with --threads 1 measures the
processor time of the process instead of elapsed time.
--smoke takes toy sizes; --write saves the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _report import commit, device_name, write_section

from monoblock.config.model import AttentionConfig
from monoblock.kernels.cpu.library import processor_name
from monoblock.nn import attention
from monoblock.nn.attention import BANDED, Attention, AttentionContext, prepare
from monoblock.nn.masks import arange_positions, mask_from_config

RESULTS = Path(__file__).with_name("results") / "window-attention.md"
HEADS, HEAD_DIM, WINDOW = 4, 64, 128
WIDTH = HEADS * HEAD_DIM
PATTERNS: dict[str, dict[str, Any]] = {
    "full causal": {},
    "window": {"window": WINDOW},
    "window + global": {"window": WINDOW, "global_tokens": True},
    "window + global + random": {"window": WINDOW, "global_tokens": True, "random_blocks": 3},
}
DENSE = "window, dense mask"  # the plain path, up to DENSE_LENGTH tokens
DENSE_LENGTH = 16_384
LENGTHS = {"cpu": [4096, 8192, 16_384, 32_768], "cuda": [32_768, 65_536, 131_072]}
MIB = 2**20


def run_layer(
    pattern: str, length: int, device: str, dtype: torch.dtype, clock: Callable[[], float]
) -> tuple[float, float]:
    """Run the layer forward and backward on a random input; return the seconds that each takes."""
    if pattern == DENSE:
        attention.KERNELS = tuple(kernel for kernel in attention.KERNELS if kernel is not BANDED)
    config = AttentionConfig(heads=HEADS, **PATTERNS["window" if pattern == DENSE else pattern])
    layer = Attention(WIDTH, config).to(device, dtype)
    x = torch.randn(1, length, WIDTH, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    start = read_clock(device, clock)
    tokens = arange_positions(length, device=x.device)
    context = prepare(AttentionContext(mask_from_config(config).resolve(tokens, tokens)), x)
    out = layer(x, context)
    middle = read_clock(device, clock)
    out.backward(grad)
    return middle - start, read_clock(device, clock) - middle


def read_clock(device: str, clock: Callable[[], float]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return clock()


def measure(pattern: str, lengths: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the best times of passes over all lengths in turn; with one pass over one length also its peak memory."""
    torch.manual_seed(0)
    device, clock = args.device, time.process_time if args.cpu_time else time.perf_counter
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    run_layer(pattern, 1024, device, dtype, clock)
    gc.collect()
    before = start_peak(device)
    rounds = [[run_layer(pattern, length, device, dtype, clock) for length in lengths] for _ in range(args.repeats)]
    peak = read_peak(device) - before
    rows = []
    for length, times in zip(lengths, zip(*rounds, strict=True), strict=True):
        if device == "cuda":
            before = start_peak(device)
            run_layer(pattern, length, device, dtype, clock)
            peak = read_peak(device) - before
        forward, backward = min(t[0] for t in times), min(t[1] for t in times)
        rows.append(
            {"pattern": pattern, "length": length, "forward": forward, "backward": backward, "peak_bytes": peak}
        )
    return rows


def start_peak(device: str) -> int:
    """Return the memory in use in bytes, and let the peak begin there."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM becomes VmRSS
    return _read_status("VmRSS")


def read_peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _read_status("VmHWM")


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure_in_process(
    pattern: str, lengths: list[int], repeats: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    options = ["--device", args.device, "--repeats", str(repeats), "--threads", str(args.threads)]
    options += ["--cpu-time"] if args.cpu_time else []
    command = [sys.executable, __file__, "--row", pattern, "--lengths", *map(str, lengths), *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_pattern(pattern: str, lengths: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the times of all lengths in one process, and on a CPU the peak memory of each in a process of its own."""
    lengths = [length for length in lengths if pattern != DENSE or length <= DENSE_LENGTH]
    rows = measure_in_process(pattern, lengths, args.repeats, args)
    for row, previous in zip(rows, [None, *rows[:-1]], strict=True):
        if args.device == "cpu":
            row["peak_bytes"] = measure_in_process(pattern, [row["length"]], 1, args)[0]["peak_bytes"]
        is_double = previous is not None and row["length"] == 2 * previous["length"]
        row["factor"] = _total(row) / _total(previous) if previous is not None and is_double else None
        print(format_row(row), file=sys.stderr, flush=True)
    return rows


def _total(row: dict[str, Any]) -> float:
    return row["forward"] + row["backward"]


def format_row(row: dict[str, Any]) -> str:
    factor = "" if row["factor"] is None else f"{row['factor']:.2f}"
    times = (f"{1000 * row[name]:,.0f}" for name in ("forward", "backward"))
    return f"| {row['pattern']} | {row['length']:,} | {' | '.join(times)} | {row['peak_bytes'] / MIB:,.0f} | {factor} |"


def format_section(rows: list[dict[str, Any]], args: argparse.Namespace, load: float) -> str:
    device = args.device
    where = f"{processor_name()}, threads: {args.threads}, fp32" if device == "cpu" else f"{device_name()}, bf16"
    clock = "Processor time" if args.cpu_time else "Elapsed time"
    title = ("CPU" if device == "cpu" else "One GPU") + (", processor time" if args.cpu_time else "")
    lines = [
        title,
        "",
        f"`python benchmarks/window_attention.py {shlex.join(sys.argv[1:])}`, {date.today()}, commit {commit()}: "
        f"{where}, torch {torch.__version__}. One layer with {HEADS} heads of {HEAD_DIM}, window {WINDOW}, batch 1. "
        f"{clock}, the best of {args.repeats} passes. Load average of the machine {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after.",
        "",
        "| pattern | tokens | forward, ms | backward, ms | peak memory, MiB | factor of the doubling |",
        "|---|---|---|---|---|---|",
        *map(format_row, rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens, each twice the one before")
    parser.add_argument("--repeats", type=int, default=5, help="passes, of which the fastest counts")
    parser.add_argument("--patterns", nargs="+", choices=[*PATTERNS, DENSE], default=[*PATTERNS, DENSE])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time, not elapsed time")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.row is not None:
        print(json.dumps(measure(args.row, args.lengths, args)))
        return
    load = os.getloadavg()[0]
    lengths = args.lengths or ([512, 1024] if args.smoke else LENGTHS[args.device])
    patterns = ["window"] if args.smoke else args.patterns
    rows = [row for pattern in patterns for row in measure_pattern(pattern, lengths, args)]
    section = format_section(rows, args, load)
    print(json.dumps(rows, indent=2) if args.json else f"## {section}")
    if args.write and not args.smoke:
        write_section(RESULTS, "Sparse attention", section)


if __name__ == "__main__":
    main()
