"""Prune attention heads of a trained model and measure the metric of its task, beside the unpruned model.

    python benchmarks/pruning.py runs/multi30k multi30k --data DIR --layers 'encoder.*' --keep 0.75 0.5 0.25 \\
        --metric bleu --out benchmarks/results/pruning.md

Nothing is trained after pruning. Published: 10 of 48 encoder heads kept for 0.15 BLEU less, with training while heads
are removed (Voita et al. 2019).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import monoblock as mb
from monoblock.cli._shared.model_folder import load_tokenizer, save_model_folder
from monoblock.runs.inspect.prune import prune_model


def measure(arguments: argparse.Namespace, keep: float, method: str) -> list[object]:
    """Return a row: the fraction kept, method, rounds, heads, parameters, the metric, and the difference of logits."""
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
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "pruned"
        save_model_folder(result.model.cpu(), load_tokenizer(arguments.model), arguments.model, folder)
        value = evaluate(arguments, folder)
    heads = f"{result.num_heads['after']} of {result.num_heads['before']}"
    size = f"{result.parameters['after']:,}"
    return [f"{keep:.0%}", method, result.num_rounds, heads, size, value, result.max_logit_difference]


def evaluate(arguments: argparse.Namespace, folder: Path) -> float:
    evaluation = mb.evaluate(folder, arguments.corpus, folder=arguments.data, device=arguments.device)
    return float(evaluation.metrics[arguments.metric])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--layers", default="*")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--methods", nargs="+", default=["gradient", "ablation"])
    parser.add_argument("--rounds", type=int, help="1 ranks all heads once; default: a head in each round, at most 16")
    parser.add_argument("--metric", default="bleu")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    before = evaluate(arguments, arguments.model)
    lines = [
        f"### Head pruning: {arguments.corpus}, layers {arguments.layers}\n",
        f"| kept | ranked by | rounds | heads | parameters | {arguments.metric} | change | logits vs. masked heads |",
        "|---|---|---|---|---|---|---|---|",
        f"| 100% | | | | | {before:.2f} | | |",
    ]
    for keep in arguments.keep:
        for method in arguments.methods:
            *cells, value, difference = measure(arguments, keep, method)
            lines.append(f"| {' | '.join(map(str, cells))} | {value:.2f} | {value - before:+.2f} | {difference:.1e} |")
            print(lines[-1], flush=True)
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    ranked = f"ranked on {arguments.batches} training batches, and not trained after pruning"
    lines.append(f"\n{device}, torch {torch.__version__}; {ranked}.")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
