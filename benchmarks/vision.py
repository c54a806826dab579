"""Image recipes (digits, MNIST, Fashion-MNIST): accuracy on the test split over several seeds.

    python benchmarks/vision.py --runs digits mnist --seeds 1 2 3 --out benchmarks/results/vision-cpu.md
    python benchmarks/vision.py --runs fashion fashion-4 --data DIR --out benchmarks/results/fashion.md   # on a GPU
    python benchmarks/vision.py --smoke                     # everything once, on toy images

Seconds are those of the training steps. The model that a run saves (averaged weights) is evaluated once, on the test
split. Runs that are finished in --keep are not trained again.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _runs import Metrics, add_arguments, collect_rows, format_tables, run_folder, train_or_load

from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import read_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.training.events import read_metrics


class Job(NamedTuple):
    title: str
    recipe: str
    split: str  # description of the splits
    overrides: tuple[str, ...] = ()
    published: str = ""


FASHION = "published split: 60,000 training images, no validation split, 10,000 test images"
JOBS = {
    "digits": Job("digits, 8 × 8", "digits", "ours, seeded: 1,438 training, 179 validation, 180 test images"),
    "mnist": Job("MNIST, 5,000 images", "mnist", "ours, seeded: 4,000 training, 500 validation, 500 test images"),
    "fashion": Job("Fashion-MNIST", "fashion", FASHION, published="92.3 % with 210 K parameters and 100 epochs"),
    "fashion-4": Job("Fashion-MNIST, patches of 4 × 4", "fashion", FASHION, ("model.patch=4",)),
}
SMOKE_OVERRIDES = [
    "train.steps=2",
    "train.save_every=1",
    "train.warmup=1",
    "train.batch=8",
    "model.width=16",
    "model.depth=1",
]


def run(job: Job, seed: int, folder: Path, data: Path | None, args: argparse.Namespace) -> Metrics:
    """Train once and return the metrics on the test split."""
    smoke = [*SMOKE_OVERRIDES, "train.workers=0"] if args.smoke else []
    overrides = [*job.overrides, *args.more, f"train.seed={seed}", *smoke]
    pipe, summary = train_or_load(job.recipe, overrides, folder, data)
    corpus = read_recipe(job.recipe, overrides).data.corpus
    metrics = evaluate_request(pipe, EvaluationRequest(data=corpus, split="test", folder=data, batch=500)).metrics
    valid = [line["val_accuracy"] for line in read_metrics(folder) if "val_accuracy" in line]
    wrong = round(metrics["sources"] * (1 - metrics["accuracy"]))
    return summary | {
        "test accuracy": metrics["accuracy"],
        "validation": valid[-1] if valid else None,
        "wrong": wrong,
        "images": metrics["sources"],
    }


def write_toy_images(folder: Path) -> Path:
    """Write a few random images in the files of Fashion-MNIST, for a smoke run."""
    (folder / "fashion").mkdir()
    random = np.random.default_rng(0)
    for stem, count in (("train", 40), ("t10k", 20)):
        arrays = {"images-idx3": random.integers(0, 256, (count, 28, 28)), "labels-idx1": np.arange(count) % 10}
        for name, array in arrays.items():
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            raw = header + array.astype(np.uint8).tobytes()
            (folder / "fashion" / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(raw))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, list(JOBS), ["digits", "mnist", "fashion"])
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        data = write_toy_images(temporary) if args.smoke else args.data
        for name, job in ((name, JOBS[name]) for name in args.runs):

            def run_seed(seed: int, name: str = name, job: Job = job) -> Metrics:
                return run(job, seed, run_folder(args, temporary, name, seed), data, args)

            rows = collect_rows(name, args, run_seed)
            notes = [f"Split: {job.split}.", job.published and f"Published: {job.published}."]
            lines += format_tables(job.title, rows, ["test accuracy", "validation", "wrong", "images"], *notes)
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
