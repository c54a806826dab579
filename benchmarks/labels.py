"""Named entities in CoNLL-2003, from scratch and from a published encoder, compared with published results.

    python benchmarks/labels.py --data DIR --seeds 1 2 3 --out benchmarks/results/conll2003.md
    python benchmarks/labels.py --data DIR --runs minilm --minilm FOLDER
    python benchmarks/labels.py --smoke                     # everything once, on toy sentences

DIR holds conll2003/{train,valid,test}.txt. `warm` is pretrained on masked tokens of the training text. Seconds are
those of all training steps. F1 is that of whole entities, as in conlleval.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from _runs import (
    Metrics,
    add_arguments,
    collect_rows,
    find_minilm,
    format_tables,
    run_folder,
    train_or_load,
)

from monoblock.runs.evaluate import evaluate_request
from monoblock.tasks.evaluation_report import EvaluationRequest

KINDS = ("LOC", "MISC", "ORG", "PER")
SMOKE_OVERRIDES = ["train.steps=2", "train.eval_every=2", "train.save_every=1", "train.warmup=1", "train.batch=4"]
GPU_OVERRIDES = ["train.workers=6", "train.compile=no"]  # rows are varied on the CPU, and batch shapes differ
TINY_MODEL = ["model.width=16", "model.heads=2", "model.depth=1", "tokenizer.vocab=400"]


# The recipe is for training from scratch; a pretrained model needs less regularization and a lower learning rate.
MINILM_OVERRIDES = (
    "tokenizer.dropout=0",
    "token_classification.replace_entities=0.1",
    "model.dropout=0.1",
    "train.label_smoothing=0",
)
MINILM_OVERRIDES += (
    "train.optimizer=adamw",
    "train.lr=2e-4",
    "train.weight_decay=0.01",
    "train.steps=2000",
    "train.batch=32",
)


class Job(NamedTuple):
    title: str
    published: str = ""


JOBS = {
    "scratch": Job("CoNLL-2003 from scratch, no outside data", "about 81, BiLSTM with random embeddings"),
    "warm": Job("CoNLL-2003 from scratch, pretrained on masked tokens of the same text", "as above; no outside data"),
    "minilm": Job("CoNLL-2003 from MiniLM-L6 (22.7 M, uncased)", "92.4, BERT-base"),
}


def run(name: str, seed: int, folder: Path, data: Path | None, args: argparse.Namespace) -> Metrics:
    """Train once and return the metrics on the validation and the test split."""
    common = [*(SMOKE_OVERRIDES if args.smoke else ()), *(GPU_OVERRIDES if torch.cuda.is_available() else ())]
    overrides, pretraining_seconds = [f"train.seed={seed}", *args.more, *common], 0.0
    if name == "minilm":
        overrides = [f"model.folder={args.minilm}", *MINILM_OVERRIDES, *overrides]
    elif name == "warm":
        pretrained = folder.with_name(f"{folder.name}-hidden")
        masked = [f"train.seed={seed}", *args.hidden, *common, *(TINY_MODEL if args.smoke else ())]
        pretraining_seconds = train_or_load("conll2003-hidden", masked, pretrained, data)[1]["seconds"]
        overrides = [f"model.folder={pretrained}", *overrides]
    elif args.smoke:
        overrides += TINY_MODEL
    pipe, summary = train_or_load("conll2003", overrides, folder, data)
    splits = ["valid"] if args.choose else ["valid", "test"]
    metrics = {
        split: evaluate_request(pipe, EvaluationRequest(data="conll2003", split=split, folder=data)).metrics
        for split in splits
    }
    last = metrics[splits[-1]]
    return summary | {
        "F1": last["f1"],
        **{kind: last["kinds"].get(kind, {"f1": 0.0})["f1"] for kind in KINDS},
        "F1 on valid": metrics["valid"]["f1"],
        "accuracy": last["accuracy"],
        "seconds": pretraining_seconds + summary["seconds"],
    }


def write_toy_corpus(folder: Path) -> Path:
    """Write a small corpus in the right format, for a smoke run."""
    rows = "Peter B-PER\nSmith I-PER\nsaw O\nRome B-LOC\nand O\nthe O\nReuters B-ORG\nCup B-MISC\n. O\n\n"
    (folder / "conll2003").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "conll2003" / f"{split}.txt").write_text(rows * 90, encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, list(JOBS))
    parser.add_argument(
        "--hidden", nargs="*", default=[], metavar="section.key=value", help="overrides of the pretraining"
    )
    parser.add_argument("--minilm", type=Path, default=find_minilm(), help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--choose", action="store_true", help="evaluate on the validation split only")
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        data = write_toy_corpus(temporary) if args.smoke else args.data
        for name in args.runs:
            if name == "minilm" and args.minilm is None:
                print("minilm: skipped, its folder was not found; give --minilm FOLDER", flush=True)
                continue

            def run_seed(seed: int, name: str = name) -> Metrics:
                return run(name, seed, run_folder(args, temporary, name, seed, *args.hidden), data, args)

            rows = collect_rows(name, args, run_seed, *args.hidden)
            columns = ["F1", *KINDS, "F1 on valid", "accuracy"]
            lines += format_tables(JOBS[name].title, rows, columns, f"Published: {JOBS[name].published}.")
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
