"""Translation on the CPU with beam 4, compared with transformers (Marian) and CTranslate2 on the same weights.

    python benchmarks/translate_cpu.py --threads 2 --write

A Marian model with random weights translates 1,000 sources of the lengths of Multi30k into targets of its average
length; no target ends earlier, so that all do the same work. Sources are sorted by length and decoded in batches of 64.
The runners take turns, and the fastest round of each counts. The table also gives the share of targets that are equal
to those of monoblock, token by token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _report import commit, write_section

from monoblock.bench.translation import (
    BEAMS,
    NEW,
    TRANSLATORS,
    Shape,
    build_setup,
    random_sources,
    time_translators,
)
from monoblock.kernels.cpu.library import processor_name

RESULTS = Path(__file__).with_name("results") / "translate-cpu.md"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        setup = build_setup(Path(folder), Shape(args.width, args.depth, args.heads, args.vocab), "cpu", args.threads)
        names = args.only or list(TRANSLATORS)
        result = time_translators(setup, names, random_sources(args.count, args.vocab), args.rounds)
    same = {
        name: sum(a == b for a, b in zip(tokens, result.targets["monoblock"], strict=True))
        for name, tokens in result.targets.items()
    }
    parameters = sum(weight.numel() for weight in setup.model.parameters())
    sizes = {"count": args.count, "threads": args.threads, "parameters": parameters}
    return {"seconds": result.seconds, "same": same, "absent": result.absent, **sizes}


def format_table(result: dict[str, Any]) -> str:
    ours, count = result["seconds"]["monoblock"], result["count"]
    lines = [
        processor_name(),
        "",
        f"`python benchmarks/translate_cpu.py --count {count} --threads {result['threads']} --write`, {date.today()}, "
        f"commit {commit()}: {count:,} sources, beam {BEAMS}, {NEW} tokens each, {result['parameters']:,} parameters, "
        f"{result['threads']} threads, torch {torch.__version__}.",
        "",
        "| runner | seconds | sentences per second | speedup of monoblock | same targets |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        same = f"{100 * result['same'][name] / count:.1f} %"
        lines.append(f"| {name} | {seconds:.2f} | {count / seconds:.0f} | {seconds / ours:.2f} × | {same} |")
    lines += ["", *(f"- {name}: {reason}" for name, reason in result["absent"].items())] if result["absent"] else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "count": 1000,
        "width": 256,
        "depth": 4,
        "heads": 4,
        "vocab": 8000,
        "threads": 2,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", action="append", choices=list(TRANSLATORS))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    if args.smoke:
        args.count, args.width, args.depth, args.vocab, args.rounds = 7, 32, 1, 61, 1
    result = measure(args)
    print(json.dumps(result) if args.json else format_table(result))
    if args.write:
        write_section(RESULTS, "Translation on the CPU", format_table(result))


if __name__ == "__main__":
    main()
