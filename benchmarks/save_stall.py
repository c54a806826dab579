"""How long a checkpoint stops the training: written during the step, or by a thread (train.save_async).

A GPT of about 100M parameters is trained for a few steps on the CPU and saved twice in each mode. The time of a step
is from one step event to the next, so that of the step after a save contains what the save took. The first save, which
allocates the memory of the copies, is shown apart. --smoke takes a toy size; --write saves the table.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from monoblock.kernels.cpu.library import processor_name
from monoblock.runs.recipe import parse_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import CheckpointEvent, StepEvent

RESULTS = Path(__file__).with_name("results") / "save-stall.md"
SAVE_EVERY = 6


def measure(folder: Path, sizes: dict[str, int], background: bool) -> dict[str, float]:
    """Train for a few steps; return seconds of steps and of saves, and the number of parameters."""
    text = folder / "text.txt"
    text.write_text("in the beginning was the word " * 2000, encoding="utf-8")
    tables = {
        "data": {"corpus": str(text)},
        "tokenizer": {"kind": "char"},
        "model": {"family": "gpt", **sizes},
        "train": {"steps": 3 * SAVE_EVERY - 1, "batch": 1, "save_every": SAVE_EVERY, "eval_every": 0, "device": "cpu"},
        "generate": {"scored_rows": 0},
    }
    tables["train"] |= {"save_async": background, "keep_checkpoints": 1}
    run = prepare_run(parse_recipe(tables, []), folder / "run")
    ends, saved = {}, {}
    events = run.events()
    for event in events:
        if isinstance(event, StepEvent):
            ends[event.step] = time.perf_counter()
            if event.step == 3 * SAVE_EVERY - 1:
                break
        elif isinstance(event, CheckpointEvent):
            saved[event.step] = time.perf_counter() - ends[event.step]
    events.close()
    shutil.rmtree(folder / "run")
    seconds = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    others = [value for step, value in seconds.items() if step - 1 not in saved and step > 3]
    return {
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "step": statistics.median(others),
        "first": seconds[SAVE_EVERY + 1],
        "second": seconds[2 * SAVE_EVERY + 1],
    }


def render(rows: dict[str, dict[str, float]]) -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    parameters = next(iter(rows.values()))["parameters"]
    lines = [
        "# The time that a save takes from the training",
        "",
        f"Written by `python {shlex.join(sys.argv)}` on {date.today()}, commit {commit}, {processor_name()}.",
        "",
        f"A GPT of {parameters / 1e6:.0f}M parameters with AdamW: a checkpoint has {parameters * 12 / 1e9:.2f} GB.",
        "",
        "| checkpoints | step without a save | step after the first save | step after the second save |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['step']:.2f} s | {row['first']:.2f} s | {row['second']:.2f} s |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    large = {"width": 768, "depth": 12, "heads": 12, "context": 64, "vocab": 20_000}
    sizes = {"width": 32, "depth": 2, "heads": 2, "context": 16} if args.smoke else large
    rows = {}
    for name, background in (("written during the step", False), ("written by a thread (`train.save_async`)", True)):
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(Path(folder), sizes, background)
    report = render(rows)
    print(report)
    if args.write and not args.smoke:
        RESULTS.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
