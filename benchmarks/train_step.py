"""A training step (forward, loss, backward) of a GPT preset, compared with GPT-2 of the same shape in transformers, and
with a plain GPT that runs the operations of nanoGPT.

All run eagerly in one process, without dropout, and take turns, so that other load affects all. The table gives the
median and the best step of each, and the median over rounds of the ratio within a round. torch's profiler says where
our time goes; the speed of the matrix products is compared with that of large matrices on this machine. --smoke runs a
toy size once; --write saves the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _report import commit, write_section
from torch.profiler import ProfilerActivity, profile

import monoblock as mb
from monoblock.bench.training import (
    OURS,
    PLAIN,
    PlainGpt,
    best_product_seconds,
    build_models,
    time_models,
    time_step,
)
from monoblock.kernels.cpu.library import processor_name

RESULTS = Path(__file__).with_name("results") / "train-cpu.md"
GROUPS = {  # group -> prefixes of operator names; the first match counts
    "matrix products": ("monoblock::linear", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("monoblock::attend", "aten::_scaled_dot_product"),
    "activation": ("monoblock::gelu", "aten::gelu", "aten::silu"),
    "norms": ("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rsqrt"),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::clone"),
    "sums and residuals": ("aten::sum", "aten::add"),
}


def profile_shares(model: torch.nn.Module, ids: torch.Tensor, rounds: int) -> tuple[dict[str, float], float]:
    """Return the share of a step that each group of operators takes, and the seconds of the matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            time_step(model, ids)
    seconds = dict.fromkeys((*GROUPS, "other"), 0.0)
    for row in profiler.key_averages():
        group = next((name for name, prefixes in GROUPS.items() if row.key.startswith(prefixes)), "other")
        seconds[group] += row.self_cpu_time_total / 1e6 / rounds
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}, seconds["matrix products"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = mb.tiny("gpt2") if args.smoke else mb.preset(args.preset)
    batch, length, rounds = (2, 16, 1) if args.smoke else (args.batch, args.length, args.rounds)
    size = 64 if args.smoke else 2048
    torch.manual_seed(0)
    ids = torch.randint(0, config.input.vocab, (batch, length))
    models, _ = build_models(config)
    if args.compile:
        models[f"{OURS}, compiled"] = torch.compile(mb.Transformer(config))
        models[f"{PLAIN}, compiled"] = torch.compile(PlainGpt(config))
    seconds = time_models(models, ids, rounds)
    shares, product_seconds = profile_shares(models[OURS], ids, min(rounds, 5))
    weights = sum(w.numel() for name, w in models[OURS].named_parameters() if w.dim() == 2 and "position" not in name)
    return {
        "model": "a toy" if args.smoke else args.preset,
        "note": args.note,
        "compile": args.compile,
        "batch": batch,
        "length": length,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "best": {name: min(times) for name, times in seconds.items()},
        "times_faster": {name: _speedups(times, seconds[OURS]) for name, times in seconds.items() if name != OURS},
        "shares": shares,
        "products_per_second": 6 * weights * batch * length / product_seconds,
        "peak_per_second": 2 * size**3 / best_product_seconds(size),
        "peak_size": size,
    }


def _speedups(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Return the ratio of medians, the ratio of best steps, and the median of ratios within a round."""
    return {
        "medians": statistics.median(theirs) / statistics.median(ours),
        "best": min(theirs) / min(ours),
        "rounds": statistics.median(their / our for their, our in zip(theirs, ours, strict=True)),
    }


def format_section(report: dict[str, Any]) -> str:
    """Return the report as a section of Markdown."""
    options = " --compile" if report["compile"] else ""
    options += f" --note {shlex.quote(report['note'])}" if report["note"] else ""
    title = f"{report['model']}, batch {report['batch']} × {report['length']}"
    lines = [
        f"{title}, {report['note']}" if report["note"] else title,
        "",
        f"`python benchmarks/train_step.py --preset {report['model']} --batch {report['batch']} "
        f"--length {report['length']} --rounds {report['rounds']}{options} --write`, "
        f"{date.today()}: {processor_name()}, {report['threads']} threads, "
        f"torch {report['torch']}, commit {commit()}; forward, loss and backward in fp32, {report['rounds']} rounds.",
        "",
        "| runner | ms per step | best | tokens/s | speedup of monoblock: rounds, medians, best |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in report["seconds"].items():
        ratios = report["times_faster"].get(name, {})
        speedup = ", ".join(f"{ratios[kind]:.2f} ×" for kind in ("rounds", "medians", "best") if ratios)
        speed = report["batch"] * report["length"] / seconds
        lines.append(f"| {name} | {1000 * seconds:.0f} | {1000 * report['best'][name]:.0f} | {speed:.0f} | {speedup} |")
    lines += ["", "| part of our step | share |", "|---|---|"]
    lines += [f"| {name} | {share:.1%} |" for name, share in report["shares"].items()]
    speed, peak, size = report["products_per_second"], report["peak_per_second"], report["peak_size"]
    lines += [
        "",
        f"The matrix products ran at {speed / 1e9:.0f} GFLOP/s, {speed / peak:.0%} of the {peak / 1e9:.0f} GFLOP/s of "
        f"a product of two {size} × {size} matrices.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--compile", action="store_true", help="also measure ours and nanoGPT's with torch.compile")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--note", default="", help="words after the title of the table, which keep other tables")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    report = measure(args)
    print(json.dumps(report) if args.json else format_section(report))
    if args.write:
        write_section(RESULTS, "Training on the CPU", format_section(report))


if __name__ == "__main__":
    main()
