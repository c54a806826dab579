"""Images: the recipes for digits, MNIST and Fashion-MNIST, some seeds each, accuracy on the test split, one table.

    python benchmarks/vision.py --runs digits mnist --seeds 1 2 3 --out benchmarks/results/vision-cpu.md
    python benchmarks/vision.py --runs fashion fashion-4 --data DIR --out benchmarks/results/fashion.md   # on a GPU
    python benchmarks/vision.py --smoke                     # everything once, on a few made-up images

Seconds are those of the training steps alone.  The figure is that of the model a run leaves (the average of weights),
once, on the split that training never reads.  A run that is finished under --keep is not trained again.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _runs import Figures, found, options, place, table, trained

from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.recipe import read
from monoblock.training import metrics


class Job(NamedTuple):
    what: str
    recipe: str
    split: str  # which images are for what
    overrides: tuple[str, ...] = ()
    published: str = ""


FASHION = "published split: 60,000 to train on, none to validate, 10,000 to test"
JOBS = {
    "digits": Job("digits, 8 × 8", "digits", "ours, seeded: 1,438 to train on, 179 to validate, 180 to test"),
    "mnist": Job("MNIST, 5,000 images", "mnist", "ours, seeded: 4,000 to train on, 500 to validate, 500 to test"),
    "fashion": Job("Fashion-MNIST", "fashion", FASHION, published="92.3 with 210 K parameters and 100 epochs"),
    "fashion-4": Job("Fashion-MNIST, patches of 4 × 4", "fashion", FASHION, ("model.patch=4",)),
}
SMALL = ["train.steps=2", "train.save_every=1", "train.warmup=1", "train.batch=8", "model.width=16", "model.depth=1"]


def run(job: Job, seed: int, folder: Path, data: Path | None, given: argparse.Namespace) -> Figures:
    """One training and its figures on the test split."""
    words = [*job.overrides, *given.more, f"train.seed={seed}", *([*SMALL, "train.workers=0"] if given.smoke else ())]
    pipe, about = trained(job.recipe, words, folder, data)
    corpus = read(job.recipe, words).data.corpus
    figures = evaluate(pipe, Asked(data=corpus, split="test", folder=data, batch=500)).figures
    valid = [line["val_accuracy"] for line in metrics.read(folder) if "val_accuracy" in line]
    wrong = round(figures["sources"] * (1 - figures["accuracy"] / 100))
    return about | {
        "test accuracy": figures["accuracy"],
        "validation": 100 * valid[-1] if valid else None,
        "wrong": wrong,
        "images": figures["sources"],
    }


def made_up(folder: Path) -> Path:
    """Fashion-MNIST's files with a few images of noise, for a run that only shows that everything works."""
    (folder / "fashion").mkdir()
    random = np.random.default_rng(0)
    for stem, count in (("train", 40), ("t10k", 20)):
        arrays = {"images-idx3": random.integers(0, 256, (count, 28, 28)), "labels-idx1": np.arange(count) % 10}
        for name, array in arrays.items():
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            raw = head + array.astype(np.uint8).tobytes()
            (folder / "fashion" / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(raw))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, list(JOBS), ["digits", "mnist", "fashion"])
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        data = made_up(made) if given.smoke else given.data
        for name, job in ((name, JOBS[name]) for name in given.runs):

            def make(seed: int, name: str = name, job: Job = job) -> Figures:
                return run(job, seed, place(given, made, name, seed), data, given)

            rows = found(name, given, make)
            notes = [f"Split: {job.split}.", job.published and f"Published: {job.published}."]
            lines += table(job.what, rows, ["test accuracy", "validation", "wrong", "images"], *notes)
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
