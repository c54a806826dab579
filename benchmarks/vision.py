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
import os
import statistics
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from monoblock.accounting.report import account
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.folder import RECIPE
from monoblock.tasks.pipeline import load
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training import metrics


class Job(NamedTuple):
    what: str
    recipe: str
    split: str  # which images are for what
    overrides: tuple[str, ...] = ()
    published: str = ""


CARD = "README.md"  # the last file a run writes
FASHION = "published split: 60,000 to train on, none to validate, 10,000 to test"
JOBS = {
    "digits": Job("digits, 8 × 8", "digits", "ours, seeded: 1,438 to train on, 179 to validate, 180 to test"),
    "mnist": Job("MNIST, 5,000 images", "mnist", "ours, seeded: 4,000 to train on, 500 to validate, 500 to test"),
    "fashion": Job("Fashion-MNIST", "fashion", FASHION, published="92.3 with 210 K parameters and 100 epochs"),
    "fashion-4": Job("Fashion-MNIST, patches of 4 × 4", "fashion", FASHION, ("model.patch=4",)),
}
SMALL = ["train.steps=2", "train.save_every=1", "train.warmup=1", "train.batch=8", "model.width=16", "model.depth=1"]


def run(job: Job, seed: int, folder: Path, data: Path | None, given: argparse.Namespace) -> dict[str, Any]:
    """One training and its figures on the test split."""
    words = [*job.overrides, *given.more, f"train.seed={seed}", *([*SMALL, "train.workers=0"] if given.smoke else ())]
    recipe = read(job.recipe, words)
    if not (folder / CARD).is_file():
        begun = (folder / RECIPE).is_file()
        for _ in prepare(recipe, folder, data=data, resume=begun).events(resume=begun):
            pass
    pipe = load(folder)
    found = evaluate(pipe, Asked(data=recipe.data.corpus, split="test", folder=data, batch=500)).figures
    lines = metrics.read(folder)
    valid = [line["val_accuracy"] for line in lines if "val_accuracy" in line]
    found["validation"] = 100 * valid[-1] if valid else None
    found["parameters"] = account(pipe.model.config).parameters
    found["seconds"] = sum(line.get("seconds", 0.0) for line in lines)
    return found


def row(job: Job, found: list[dict[str, Any]]) -> list[str]:
    """The lines of one job: accuracy as mean, and deviation where there are several seeds; then each seed."""
    lines = [f"### {job.what}", "", "| seeds | test accuracy | validation | wrong | parameters | training seconds |"]
    lines.append("|---" * 6 + "|")
    seconds = _mean([figures["seconds"] for figures in found], 0)
    accuracy, valid = (_mean([figures[name] for figures in found]) for name in ("accuracy", "validation"))
    lines.append(f"| {len(found)} | {accuracy} | {valid} | | {found[0]['parameters']:,} | {seconds} |")
    for one in found:
        wrong = round(one["sources"] * (1 - one["accuracy"] / 100))
        told = [f"{one['accuracy']:.2f}", _mean([one["validation"]]), f"{wrong} of {one['sources']:,}", ""]
        lines.append(f"| | {' | '.join(told)} | {one['seconds']:.0f} |")
    notes = [f"Split: {job.split}.", job.published and f"Published: {job.published}."]
    return [*lines, "", *(note for note in notes if note), ""]


def _mean(values: list[Any], digits: int = 2) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}"


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
    parser.add_argument("--runs", nargs="*", default=["digits", "mnist", "fashion"], choices=list(JOBS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    changes = " ".join(given.more) or "none"
    lines = [f"Trained on {device}, torch {torch.__version__}; changes to the recipes: {changes}.", ""]
    with tempfile.TemporaryDirectory() as place:
        data = made_up(Path(place)) if given.smoke else given.data
        for name in given.runs:
            folder = given.keep or Path(place) / "runs"
            found = [run(JOBS[name], seed, folder / f"{name}-{seed}", data, given) for seed in given.seeds]
            lines += row(JOBS[name], found)
            print("\n".join(row(JOBS[name], found)), flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
