"""A Transformer and an LSTM with as many parameters on WikiText-2 by words, trained at the same time.

    python benchmarks/wikitext2.py --data DIR --out benchmarks/results/wikitext2.md
    python benchmarks/wikitext2.py --transformer train.steps=20000 --lstm train.steps=9000
    python benchmarks/wikitext2.py --seconds 330 250     # as many steps as fit, learning rate decayed over time

Each is trained in its own process; on a shared GPU, the seconds are not those of one model alone. Test perplexity is
reported in blocks of the context, in windows that move by 32 words (so that each word has almost a full context before
it), and for the LSTM also over the whole split with its state carried along.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from quality import train

from monoblock.accounting.lstm import matching_config
from monoblock.config.model import ModelConfig
from monoblock.runs.recipe import build_model_config, read_recipe

WORDS = 33_278  # size of the published vocabulary
ALIGNMENT = 8  # tensor cores need sizes divisible by 8
PUBLISHED = (("LSTM 650, tied", "86.7"), ("LSTM 1500, tied", "84.1"))
SMOKE_OVERRIDES = ["train.steps=3", "train.eval_every=3", "train.warmup=1", "model.context=32", "train.batch=2"]
COLUMNS = ("blocks", "sliding", "carried", "parameters", "validation loss", "steps", "tokens", "seconds")


def matching_width(overrides: list[str]) -> int:
    """Return the width at which the LSTM has about as many parameters as the Transformer, a multiple of ALIGNMENT."""
    config = build_model_config(read_recipe("wikitext2", overrides), WORDS)
    assert isinstance(config, ModelConfig)
    return ALIGNMENT * max(1, round(matching_config(config).width / ALIGNMENT))


def format_row(name: str, result: dict) -> str:
    test = result["test"]
    perplexities = [f"{test[mode]:.2f}" if mode in test else "" for mode in ("blocks", "sliding", "carried")]
    rest = [f"{result['parameters']:,}", f"{result['val_loss']:.4f}", f"{result['steps']:,}", f"{result['tokens']:,}"]
    return f"| {' | '.join([name, *perplexities, *rest])} | {result['training_seconds']:.0f} |"


def format_table(results: dict[str, dict]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"WikiText-2, {WORDS:,} words, trained at the same time on one {device}, torch {torch.__version__}: "
        "test perplexity",
        "",
        f"| model | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    lines += [format_row(name, results[name]) for name in sorted(results, reverse=True)]
    lines += [f"| published: {name} | | | {perplexity} |{' |' * (len(COLUMNS) - 3)}" for name, perplexity in PUBLISHED]
    lines += ["", *(f"{name}: {describe_training(results[name])}" for name in sorted(results, reverse=True))]
    return "\n".join(lines) + "\n"


def describe_training(result: dict) -> str:
    """Describe the overrides, the time limit and the validation loss by step."""
    limit = [] if result["seconds"] is None else [f"as many steps as fit in {result['seconds']:.0f} s"]
    curve = ", ".join(f"{loss:.3f} at {step:,}" for step, loss in result["curve"])
    return "; ".join(
        ["recipe " + " ".join([result["recipe"], *result["overrides"]]), *limit, f"validation loss {curve}"]
    )


def write_toy_corpus(folder: Path) -> Path:
    """Write a small corpus in the right format, for a smoke run."""
    corpus = folder / "wikitext2"
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(" = A = \n a word and another word \n" * 40, encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformer", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--lstm", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--seconds", type=float, nargs=2, default=[None, None], metavar=("TRANSFORMER", "LSTM"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.data = write_toy_corpus(Path(folder))
            args.transformer = [*SMOKE_OVERRIDES, "model.vocab=64", "model.width=24", "model.heads=3", "model.depth=1"]
            args.lstm = [*SMOKE_OVERRIDES, "model.vocab=64", "model.width=24"]
        else:
            args.lstm = [f"model.width={matching_width(args.transformer)}", *args.lstm]
        jobs = {"Transformer": ("wikitext2", args.transformer), "LSTM": ("wikitext2-lstm", args.lstm)}
        results: dict[str, dict] = {}
        with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
            running = {
                pool.submit(train, *job, args.seed, args.data, seconds): name
                for (name, job), seconds in zip(jobs.items(), args.seconds, strict=True)
            }
            for future in as_completed(running):
                results[running[future]] = future.result()
                print(json.dumps(results[running[future]]), flush=True)
                if args.out:  # after each model, so that its result is kept if the other fails
                    args.out.write_text(format_table(results), encoding="utf-8")
    print(format_table(results))


if __name__ == "__main__":
    main()
