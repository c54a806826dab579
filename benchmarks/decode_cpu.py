"""Decoding one sequence on the CPU, compared with transformers, CTranslate2 and llama.cpp.

Random weights; prompts are the first 32 bytes of five texts; 64 new tokens, greedy, no end token; medians. Every runner
has its own process, because the idle threads of one would slow down another. The columns are those of `monoblock
bench`. A token reads every weight once, so the table also gives the bytes of weights read per second, and their share
of the memory bandwidth, measured in the same run; with a draft, weights are read once for several tokens. The number of
accepted proposals, and whether the text is unchanged, is reported over all five texts. --smoke runs a toy size once;
--write saves the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _report import commit, write_section

import monoblock as mb
from monoblock.bench.generation import DEFAULT_RUNNERS, measure_runners
from monoblock.cli.machine import print_report
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import make_self_draft
from monoblock.kernels.cpu.library import processor_name

RESULTS = Path(__file__).with_name("results") / "decode-cpu.md"
COMMON_KEYS = ("device", "dtype", "threads", "torch", "prompt", "new", "batch", "rounds", "kv_cache_bytes")
SELF_DRAFT = "monoblock, own 8-bit draft"
TEXTS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak. First Citizen: You are resolved.",
)
RATIOS = (
    (SELF_DRAFT, "transformers"),
    (SELF_DRAFT, "CTranslate2, fp32"),
    ("monoblock", "transformers"),
    ("monoblock", "CTranslate2, fp32"),
    ("monoblock, 8 bits", "CTranslate2, int8"),
    ("monoblock, 4 bits", "CTranslate2, int8"),
    ("monoblock, 4 bits", "monoblock, 8 bits"),
    ("monoblock, 8 bits, 8-bit activations", "CTranslate2, int8"),
    ("monoblock, 4 bits, 8-bit activations", "CTranslate2, int8"),
)
PREFILL_RATIOS = (
    ("monoblock", "transformers"),
    ("monoblock, 8 bits", "CTranslate2, int8"),
    ("monoblock, 4 bits", "monoblock, 8 bits"),
    ("monoblock, 8 bits, 8-bit activations", "CTranslate2, int8"),
    ("monoblock, 4 bits, 8-bit activations", "CTranslate2, int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", help="may be repeated  [gpt2]")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="processes per runner, taking turns; the best is reported")
    parser.add_argument("--only", action="append", help="run only this runner; may be repeated")
    parser.add_argument("--note", default="", help="words after the title of the table, which keep other tables")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the tables to results/{RESULTS.name}")
    parser.add_argument("--here", action="store_true", help="run everything in this process")
    parser.add_argument("--memory", action="store_true", help="only print the memory bandwidth")
    parser.add_argument("--proposals", action="store_true", help="only print the number of accepted proposals")
    args = parser.parse_args()
    if args.memory or args.proposals:
        preset = (args.preset or ["gpt2"])[0]
        print(memory_bandwidth() if args.memory else json.dumps(count_proposals(preset, args)))
        return
    for name in args.preset or ["gpt2"]:
        report = measure_here(name, args) if args.here or args.smoke else measure_in_processes(name, args)
        report["ratios"] = speed_ratios(report)
        if args.json:
            print(json.dumps(report))
            continue
        print_report(report)
        for pair, ratio in report["ratios"].items():
            print(f"  {pair}: {ratio:.2f} ×")
        if args.write:
            write_section(RESULTS, "Decoding on the CPU, one sequence", format_section(report))


def measure_here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the runners in this process, in turns."""
    torch.manual_seed(0)
    toy = mb.gpt(vocab=256, width=64, depth=2, heads=4, context=64, activation="gelu_tanh")
    model = mb.Transformer(toy if args.smoke else mb.preset(name)).eval()
    prompt, new, rounds = (5, 8, 1) if args.smoke else (args.prompt, args.new, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        batches = [[ids] for ids in encode_prompts(prompt)]
        report = measure_runners(model, Path(folder), args.only or DEFAULT_RUNNERS, prompt, new, 1, rounds, batches)
    return {"model": "a toy" if args.smoke else name} | report


def encode_prompts(length: int) -> list[list[int]]:
    """Return the first bytes of each text, used as token ids."""
    return [list(text.encode()[:length]) for text in TEXTS]


def count_proposals(name: str, args: argparse.Namespace) -> dict[str, int]:
    """Count the tokens the draft proposed, those accepted, and the texts equal to plain greedy decoding."""
    torch.manual_seed(0)
    model = mb.Transformer(mb.preset(name)).eval()
    fast = mb.optimize(model)
    draft = make_self_draft(fast, "8-bit")
    assert draft is not None
    counts = {"same": 0, "texts": len(TEXTS)}
    for ids in encode_prompts(args.prompt):
        engine = Engine(fast, capacity=args.prompt + args.new, proposer=draft)
        engine.add(ids, Settings(max_new_tokens=args.new))
        tokens: list[int] = []
        while engine.busy:
            tokens += [token for event in engine.step() for token in event.tokens]
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=args.new)[0, args.prompt :]
        counts["same"] += greedy.tolist() == tokens
    counts["proposed"], counts["kept"] = draft.proposed, draft.accepted
    return counts


def memory_bandwidth(size: int = 1 << 29, rounds: int = 15) -> float:
    """Return bytes per second: the fastest of several passes over half a gigabyte."""
    numbers = torch.ones(size // 4)
    rows, vector = numbers.view(-1, 4096), torch.ones(4096)
    seconds = []
    passes: list[Callable[[], Any]] = [
        numbers.sum,
        lambda: torch.mv(rows, vector),
        lambda: torch.dot(numbers, numbers),
    ]
    for run in passes:
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return size / min(seconds)


def measure_in_processes(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every runner in its own process, one after the other, in turns."""
    report: dict[str, Any] = {"model": name, "runners": {}, "absent": {}}
    bandwidths = [_last_line(["--memory"])]
    sizes = ["--prompt", str(args.prompt), "--new", str(args.new), "--rounds", str(args.rounds)]
    for runner in args.turns * list(args.only or DEFAULT_RUNNERS):
        try:
            turn = json.loads(_last_line(["--here", "--json", "--preset", name, "--only", runner, *sizes]))
        except subprocess.CalledProcessError as problem:
            if runner.startswith("monoblock"):
                raise
            report["absent"][runner] = f"ended with exit code {problem.returncode}"
            continue
        report["absent"] |= turn["absent"]
        for key, row in turn["runners"].items():  # other load on the machine only makes a turn slower
            best = report["runners"].get(key, row)
            prefill = max(best["prefill_tokens_per_second"], row["prefill_tokens_per_second"])
            fastest = max(best, row, key=lambda result: result["decode_tokens_per_second"] or 0)
            report["runners"][key] = fastest | {"prefill_tokens_per_second": prefill}
        report |= {key: turn[key] for key in COMMON_KEYS}
        bandwidths.append(_last_line(["--memory"]))
    if SELF_DRAFT in report["runners"]:
        report["proposals"] = json.loads(_last_line(["--proposals", "--preset", name, *sizes]))
    return report | {
        "turns": args.turns,
        "only": args.only or [],
        "note": args.note,
        "memory_bytes_per_second": max(map(float, bandwidths)),
    }


def _last_line(arguments: list[str]) -> str:
    """Run this file with these arguments and return the last line of its output."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def speed_ratios(report: dict[str, Any]) -> dict[str, float]:
    ratios = {}
    for title, key, pairs in (("", "decode", RATIOS), ("prefill, ", "prefill", PREFILL_RATIOS)):
        speeds = {name: row[f"{key}_tokens_per_second"] for name, row in report["runners"].items()}
        measured = [pair for pair in pairs if all(speeds.get(name) for name in pair)]
        ratios |= {f"{title}{first} / {second}": speeds[first] / speeds[second] for first, second in measured}
    return ratios


def format_section(report: dict[str, Any]) -> str:
    """Return the table of a model as a section of Markdown."""
    sizes = f"--preset {report['model']} --rounds {report['rounds']} --turns {report['turns']}"
    sizes += "".join(f" --only {shlex.quote(runner)}" for runner in report["only"])
    bandwidth = report["memory_bytes_per_second"]
    sizes += f" --note {shlex.quote(report['note'])}" if report["note"] else ""
    lines = [
        f"{report['model']}, {report['note']}" if report["note"] else report["model"],
        "",
        f"`python benchmarks/decode_cpu.py {sizes} --write`, {date.today()}, commit {commit()}: "
        f"{processor_name()}, {report['threads']} threads, torch {report['torch']}; random weights, a prompt of "
        f"{report['prompt']} "
        f"bytes and {report['new']} new tokens, another text each round, median of {report['rounds']} rounds, the "
        f"best of {report['turns']} turns, each in its own process.",
        "",
        "| runner | prefill tok/s | decode tok/s | ms per token | weights | read GB/s | share of bandwidth |",
        "|---|---|---|---|---|---|---|",
        *(_format_row(name, row, bandwidth) for name, row in report["runners"].items()),
        "",
        f"The memory bandwidth is {bandwidth / 1e9:.1f} GB/s with all threads.",
    ]
    if "proposals" in report:
        counts = report["proposals"]
        lines += [
            f"8-bit self-draft: {counts['kept']} of {counts['proposed']} proposals were accepted "
            f"({counts['kept'] / counts['proposed']:.1%}); {counts['same']} of {counts['texts']} texts equal plain "
            "greedy decoding token by token.",
        ]
    lines += ["", *(f"- {pair}: {ratio:.2f} ×" for pair, ratio in report["ratios"].items())]
    lines += [f"- {name}: {reason}" for name, reason in report["absent"].items()]
    return "\n".join(lines)


def _format_row(name: str, row: dict[str, Any], bandwidth: float) -> str:
    speed, size = row["decode_tokens_per_second"], row["weight_bytes"]
    cells = [name, f"{row['prefill_tokens_per_second']:.1f}", "", "", "", "", ""]
    if speed is not None:
        cells[2:5] = [f"{speed:.1f}", f"{1000 / speed:.2f}", f"{size / 1e6:.0f} MB"]
        if name == SELF_DRAFT:  # weights are read once for several tokens, and those of the copy several times
            cells[4] += " and the 8-bit copy"
        else:
            cells[5:] = [f"{speed * size / 1e9:.1f}", f"{speed * size / bandwidth:.0%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
