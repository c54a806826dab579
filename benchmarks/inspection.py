"""Coreference and probes of a published encoder, and the cost of a trace that is not used.

    python benchmarks/inspection.py MODEL --tagged FILE.txt --out benchmarks/results/inspection.md

MODEL is a folder of all-MiniLM-L6-v2 or of another encoder; FILE has one word and its label per line (CoNLL-2003).
--smoke takes an encoder of the recipe masked-kjv that was trained for two steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _report import print_report

import monoblock as mb
from monoblock.runs.inspect import Request, coreference_part, encode_input, probes_part

TEXT = "The animal didn't cross the street because it was too tired."


def coreference_lines(data: dict[str, Any]) -> list[str]:
    sentences = f"{data['score']:.1%} of 40 sentences, both sentences of {data['pair_score']:.0%} of 20 pairs"
    chance = (
        f"the best of {data['num_heads']} heads reaches up to {data['chance']:.1%} by chance (95 % of random swaps)"
    )
    lines = ["### Coreference\n", f"Best head: {data['layer']} head {data['head']}: {sentences}; {chance}.\n"]
    lines += ["| missed sentence | the pronoun is | weight on it | weight on the other noun |", "|---|---|---|---|"]
    for row in data["misses"]:
        weights = f"{row['referent_weight']:.2f} | {row['other_weight']:.2f} ({row['other']})"
        lines.append(f"| {row['sentence']} | {row['referent']} | {weights} |")
    return lines


def probe_lines(data: dict[str, Any], name: str) -> list[str]:
    sizes = f"{data['num_train']:,} words to train, {data['num_test']:,} to test"
    sizes += f"; always the most frequent label: {data['majority']:.1%}"
    lines = [
        f"\n### Linear probes: {name}\n",
        f"{sizes}.\n",
        "| after | accuracy | control task | selectivity |",
        "|---|---|---|---|",
    ]
    for row in data["layers"]:
        lines.append(f"| {row['layer']} | {row['accuracy']:.1%} | {row['control']:.1%} | {row['selectivity']:.1%} |")
    return lines


def unused_trace_lines(rounds: int = 12, passes: int = 10) -> list[str]:
    """Time passes of a small model before and after traces, in turns; other processes disturb all but the fastest."""
    model = mb.Transformer(mb.gpt(vocab=61, width=128, depth=4, heads=4, context=128)).eval()
    ids = torch.randint(61, (4, 128))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    @torch.no_grad()
    def seconds() -> float:
        start = time.perf_counter()
        model(ids)
        return time.perf_counter() - start

    seconds()
    before: list[float] = []
    after: list[float] = []
    for _ in range(rounds):
        before += [seconds() for _ in range(passes)]
        mb.trace(model, ids)
        after += [seconds() for _ in range(passes)]
    torch.set_num_threads(threads)
    fastest = [1000 * min(times) for times in (before, after)]
    times = f"fastest {fastest[0]:.2f} ms before, {fastest[1]:.2f} ms after a trace (one thread)"
    return ["\n### A trace that is not used\n", f"{rounds * passes} passes of a GPT of 4 × 128 each: {times}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--tagged", type=Path)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.smoke:
        parser.error("give the folder of a model, or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            sizes = {"train.steps": 2, "train.eval_batches": 1, "data.limit": 40, "model.width": 16, "model.depth": 1}
            mb.train("masked-kjv", sizes, out=f"{folder}/run", progress=False)
        print_report(measure(arguments, mb.load(arguments.model or f"{folder}/run", device="cpu")), arguments.out)


def measure(arguments: argparse.Namespace, pipe: mb.Pipeline) -> list[str]:
    labelled = None if arguments.tagged is None else str(arguments.tagged)
    request = Request(pipe, encode_input(pipe, TEXT), labelled_data=labelled, limit=arguments.limit)
    lines = coreference_lines(coreference_part(request).data)
    if labelled is not None:
        lines += probe_lines(
            probes_part(request).data, f"the first {arguments.limit} sentences of {arguments.tagged.name}"
        )
    lines += unused_trace_lines(*([1, 1] if arguments.smoke else []))
    lines.append(f"\n{pipe!r}; CPU, {torch.get_num_threads()} threads, torch {torch.__version__}.")
    return lines


if __name__ == "__main__":
    main()
