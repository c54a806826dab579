"""Exercise 8.9 of the textbook chapter: a small Transformer and an LSTM of the same size, trained on the same words.

    python benchmarks/exercise_8_9.py --data DIR --write        # DIR has wikitext2/train.txt; a few minutes on a CPU

The training perplexity is e to the mean loss of the steps of the last epoch. --smoke takes a packaged corpus and two
epochs of four chapters.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from datetime import date
from pathlib import Path

import torch
from _report import commit, device_name, write_section

import monoblock as mb
from monoblock.kernels.cpu.library import processor_name

RESULTS = Path(__file__).with_name("results") / "exercise-8-9.md"
RECIPES = {"Transformer": "exercise-8-9", "LSTM": "exercise-8-9-lstm"}
SMOKE = {"data.corpus": "kjv", "data.limit": 4, "train.epochs": 2, "train.eval_batches": 1, "train.device": "cpu"}
SEED = 1  # the default of a recipe
PROMPT, NEW_TOKENS = "The history of machine learning", 50


def run_recipe(name: str, data: Path | None, smoke: bool, folder: Path) -> tuple[list[str], str]:
    """Train a recipe; return the cells of its row, and the text that it generates."""
    run = mb.train(name, (SMOKE if smoke else {}) | {"train.seed": SEED}, out=folder / name, data=data, progress=False)
    steps = [row for row in mb.read_metrics(run.folder) if "loss" in row]
    epochs = 2 if smoke else 5
    last = steps[-max(1, round(len(steps) / epochs)) :]
    perplexity = math.exp(statistics.mean(row["loss"] for row in last))
    parameters = sum(weight.numel() for weight in run.model.parameters())
    milliseconds = 1000 * statistics.median(row["seconds"] for row in steps)
    text = mb.load(run.folder).generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0)
    validation = math.exp(run.metrics["val_loss"])
    cells = [f"{parameters:,}", f"{len(steps)}", f"{perplexity:.1f}", f"{validation:.1f}", f"{milliseconds:.0f}"]
    return cells, str(text)


def section(args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        results = {who: run_recipe(name, args.data, args.smoke, Path(folder)) for who, name in RECIPES.items()}
    device = device_name() if torch.cuda.is_available() else f"{processor_name()}, {torch.get_num_threads()} threads"
    lines = [
        "Transformer and LSTM",
        "",
        f"`python benchmarks/exercise_8_9.py --data DIR --write`, {date.today()}, commit {commit()}: {device}, "
        f"torch {torch.__version__}. Recipes {' and '.join(RECIPES.values())}, seed {SEED}.",
        "",
        "| model | parameters | updates | training perplexity | validation perplexity | ms per update |",
        "|---|---|---|---|---|---|",
        *(f"| {who} | {' | '.join(cells)} |" for who, (cells, _) in results.items()),
        "",
        f"Greedy continuations of {PROMPT!r} by {NEW_TOKENS} tokens:",
    ]
    for who, (_, text) in results.items():
        lines += ["", f"{who}:", "", "```text", text.strip(), "```"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with corpora")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    text = section(args)
    print(text)
    if args.write:
        write_section(RESULTS, "Exercise 8.9", text)


if __name__ == "__main__":
    main()
