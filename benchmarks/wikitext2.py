"""A Transformer and an LSTM of as many weights on WikiText-2 by words, trained in one run, and their table.

    python benchmarks/wikitext2.py --data DIR --out benchmarks/results/wikitext2.md
    python benchmarks/wikitext2.py --transformer train.steps=20000 --lstm train.steps=9000
    python benchmarks/wikitext2.py --seconds 330 250     # as many steps as fit, the rate falling with the time

Both are trained at once, each by a process of its own: on a shared GPU the seconds are not those of a model alone.
Test perplexity is told in every way a model can be asked: in blocks of its context, in windows that move on by 32
words (each word has almost a whole context before it), and of the LSTM also read in one go, its state carried along.
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

from monoblock.config import ModelConfig
from monoblock.recurrent import matching
from monoblock.tasks.recipe import model_config, read

TYPES = 33_278  # the published vocabulary, as the tokenizer finds it
ALIGNED = 8  # matrix units want sizes that 8 divides
PUBLISHED = (("LSTM 650, tied", "86.7"), ("LSTM 1500, tied", "84.1"))
SMALL = ["train.steps=3", "train.eval_every=3", "train.warmup=1", "model.context=32", "train.batch=2"]
COLUMNS = ("blocks", "sliding", "carried", "parameters", "validation loss", "steps", "tokens", "seconds")


def equal_width(overrides: list[str]) -> int:
    """The width at which the LSTM has as many weights as the Transformer, to the nearest multiple of eight."""
    config = model_config(read("wikitext2", overrides), TYPES)
    assert isinstance(config, ModelConfig)
    return ALIGNED * max(1, round(matching(config).width / ALIGNED))


def row(name: str, found: dict) -> str:
    test = found["test"]
    ways = [f"{test[way]:.2f}" if way in test else "" for way in ("blocks", "sliding", "carried")]
    steps, tokens = found["steps"], found["tokens"]
    rest = [f"{found['parameters']:,}", f"{found['val_loss']:.4f}", f"{steps:,}", f"{tokens:,}"]
    return f"| {' | '.join([name, *ways, *rest])} | {found['training_seconds']:.0f} |"


def table(found: dict[str, dict]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"WikiText-2, {TYPES:,} types, trained at once on one {device}, torch {torch.__version__}: test perplexity",
        "",
        f"| model | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    lines += [row(name, found[name]) for name in sorted(found, reverse=True)]
    lines += [f"| published: {name} | | | {figure} |{' |' * (len(COLUMNS) - 3)}" for name, figure in PUBLISHED]
    lines += ["", *(f"{name}: {told(found[name])}" for name in sorted(found, reverse=True))]
    return "\n".join(lines) + "\n"


def told(found: dict) -> str:
    """How the training went on: what was overridden, how long it was to take, the validation loss by step."""
    allowed = [] if found["seconds"] is None else [f"as many steps as fit in {found['seconds']:.0f} s"]
    curve = ", ".join(f"{loss:.3f} at {step:,}" for step, loss in found["curve"])
    return "; ".join(
        ["recipe " + " ".join([found["recipe"], *found["overrides"]]), *allowed, f"validation loss {curve}"]
    )


def made_up(folder: Path) -> Path:
    """A corpus of the right shape, for a run that only shows that everything works."""
    place = folder / "wikitext2"
    place.mkdir()
    for split in ("train", "valid", "test"):
        (place / f"{split}.txt").write_text(" = A = \n a word and another word \n" * 40, encoding="utf-8")
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.smoke:
            given.data = made_up(Path(folder))
            given.transformer = [*SMALL, "model.vocab=64", "model.width=24", "model.heads=3", "model.depth=1"]
            given.lstm = [*SMALL, "model.vocab=64", "model.width=24"]
        else:
            given.lstm = [f"model.width={equal_width(given.transformer)}", *given.lstm]
        jobs = {"Transformer": ("wikitext2", given.transformer), "LSTM": ("wikitext2-lstm", given.lstm)}
        found: dict[str, dict] = {}
        with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
            going = {
                pool.submit(train, *job, given.seed, given.data, seconds): name
                for (name, job), seconds in zip(jobs.items(), given.seconds, strict=True)
            }
            for done in as_completed(going):
                found[going[done]] = done.result()
                print(json.dumps(found[going[done]]), flush=True)
                if given.out:  # after each: what is there is not lost with the rest
                    given.out.write_text(table(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
