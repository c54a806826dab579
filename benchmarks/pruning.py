"""Prune attention heads of a trained model and measure the metric of its task, beside the unpruned model.

    python benchmarks/pruning.py runs/multi30k multi30k --data DIR --layers 'encoder.*' --keep 0.75 0.5 0.25 \\
        --train 300 train.lr=2e-4 --out benchmarks/results/pruning.md

With --train STEPS, both the pruned and the unpruned model are also trained for so many further steps of their recipe.
Published: 10 of 48 encoder heads kept for 0.15 BLEU less, trained while heads are removed (Voita et al. 2019).
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import date
from pathlib import Path

import torch
from _report import print_report

import monoblock as mb
from monoblock.runs.prune import prune_model

SMOKE = {"train.steps": 2, "train.eval_batches": 1, "train.save_every": 1}
HEADER = ["kept", "ranked by", "rounds", "heads", "parameters", "logits vs. masked heads"]


def measure(arguments: argparse.Namespace, keep: float, method: str, folder: Path) -> list[str]:
    """Return the cells of a pruned model: how it was pruned, its size and its metric."""
    result = prune_model(
        arguments.model,
        arguments.corpus,
        keep=keep,
        layers=arguments.layers,
        method=method,
        rounds=arguments.rounds,
        num_batches=arguments.batches,
        device=arguments.device,
        data_folder=arguments.data,
    )
    result.model.cpu().save_pretrained(folder)
    heads = f"{result.num_heads['after']} of {result.num_heads['before']}"
    cells = [f"{keep:.0%}", method, str(result.num_rounds), heads, f"{result.parameters['after']:,}"]
    return [*cells, f"{result.max_logit_difference:.1e}", *evaluate(arguments, folder)]


def evaluate(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Return the metric of a model and, with --train, its metric after further training."""
    folders = [folder]
    if arguments.train:
        overrides = {"model.folder": str(folder), "train.steps": arguments.train, "train.device": arguments.device}
        words = [*(f"{key}={value}" for key, value in overrides.items()), *arguments.overrides]
        out = arguments.temporary / f"{folder.name}-trained"
        folders.append(mb.train(arguments.corpus, words, out=out, data=arguments.data, progress=False).folder)
    options = {"folder": arguments.data, "device": arguments.device}
    values = [mb.evaluate(each, arguments.corpus, **options).metrics[arguments.metric] for each in folders]
    return [f"{float(value):.2f}" for value in values]


def report(arguments: argparse.Namespace) -> list[str]:
    columns = [*HEADER, arguments.metric, *([f"after {arguments.train} steps"] if arguments.train else [])]
    rows = [["100%", *[""] * (len(HEADER) - 1), *evaluate(arguments, arguments.model)]]
    for keep in arguments.keep:
        for method in arguments.methods:
            rows.append(measure(arguments, keep, method, arguments.temporary / f"{method}-{keep:g}"))
            print(rows[-1], flush=True)
    lines = [f"### Head pruning: {arguments.corpus}, layers {arguments.layers}\n"]
    lines += [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    trained = f"then trained with {' '.join(arguments.overrides)}" if arguments.train else "not trained further"
    lines.append(
        f"\n{device}, torch {torch.__version__}, {date.today()}; ranked on {arguments.batches} batches; {trained}."
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("corpus", nargs="?", help="a recipe, such as multi30k, whose corpus ranks and measures")
    parser.add_argument("overrides", nargs="*", help="for --train: section.key=value")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--layers", default="*")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--methods", nargs="+", default=["gradient", "ablation"])
    parser.add_argument("--rounds", type=int, help="1 ranks all heads once; default: a head in each round, at most 16")
    parser.add_argument("--metric", default="bleu")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--train", type=int, default=0, metavar="STEPS")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="prune a small model that was trained for two steps")
    arguments = parser.parse_intermixed_args()
    if not arguments.smoke and (arguments.model is None or arguments.corpus is None):
        parser.error("give the folder of a model and the name of a recipe, or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        arguments.temporary = Path(folder)
        if arguments.smoke:
            arguments.model = mb.train("reverse", SMOKE, out=arguments.temporary / "run", progress=False).folder
            arguments.corpus, arguments.keep, arguments.batches, arguments.train = "reverse", [0.5], 1, 1
            arguments.overrides = ["train.eval_batches=1"]
        print_report(report(arguments), arguments.out)


if __name__ == "__main__":
    main()
