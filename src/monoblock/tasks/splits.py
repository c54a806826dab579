"""Read the training and the validation rows of a recipe, and say how they were divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.readers.by_path import Holdout
from monoblock.data.readers.records import CorpusKind
from monoblock.recipes.schema import DataSection, Recipe
from monoblock.training.events import DecisionEvent, WarningEvent

MAX_CLASSES_SHOWN = 5


@dataclass(frozen=True)
class CorpusSplits:
    train: Corpus
    valid: Corpus | None
    labels: list[str]  # all labels of the training rows, before data.limit is applied and rows are held out
    digests: dict[str, str]  # SHA-256 of the content of each split


def holdout_of(section: DataSection) -> Holdout:
    """Return how a recipe holds out rows for validation."""
    return Holdout(section.split, section.validation_rows)


def load_splits(
    recipe: Recipe, kinds: Sequence[CorpusKind], folder: Path | None, *, kind: CorpusKind | None = None
) -> tuple[Corpus, Corpus | None]:
    """Read the training and the validation rows of a recipe.

    The validation rows are `data.validation_rows` of the training rows, chosen as `data.split` says. If that key is 0,
    they are the split `valid`, or a tenth of a single file, or None if the corpus has neither.

    kinds: the kinds of corpus that the task reads.
    folder: the user's folder of corpora.
    kind: the kind of corpus that a path is read as; None infers it from the suffix and `kinds`.
    """
    name = recipe.data.corpus
    kind = kind if kind is not None else infer_corpus_kind(name, tuple(kinds), folder=folder)
    options: dict[str, Any] = {"folder": folder, "kind": kind, "holdout": holdout_of(recipe.data)}
    return load_corpus(name, "train", **options), load_corpus_if_present(name, "valid", **options)


def describe_splits(splits: CorpusSplits, recipe: Recipe) -> Iterator[DecisionEvent | WarningEvent]:
    """Say which rows are held out for validation, and warn of classes that a split lacks."""
    train, valid = splits.train, splits.valid
    if valid is not None and valid.selection:
        if train.kind == "text" and len(train) == len(valid) == 1:
            yield DecisionEvent(f"{valid.selection} is held out for validation", "a running text has no rows to draw")
        else:
            count = f"{len(valid):,} row{'s are' if len(valid) > 1 else ' is'} held out for validation"
            yield DecisionEvent(count, valid.selection)
    if train.kind == "tagged" and not (valid is not None and valid.selection):
        return  # published corpora of tagged words have tags that are rare
    missing = _missing_classes(train, splits.labels)
    if missing:
        limit = f": data.limit={recipe.data.limit} takes the first rows; raise it, or shuffle the file"
        yield WarningEvent(f"no training row has {missing}{limit if recipe.data.limit else '; it cannot be learned'}")
    missing = "" if valid is None else _missing_classes(valid, splits.labels)
    if missing:
        header = " (if the first line of the file names its columns, call them label and text)"
        hint = header if _has_unique_first_label(train) else ""
        yield WarningEvent(f"no validation row has {missing}; the validation metrics say nothing about it{hint}")


def _has_unique_first_label(train: Corpus) -> bool:
    """Return whether no other row has the label of the first row, which may be a header."""
    labels = [row.label for row in train.rows] if train.kind == "labelled" else []
    return labels.count(labels[0]) == 1 if labels else False


def _missing_classes(corpus: Corpus, labels: Sequence[str]) -> str:
    """Name the classes that no row of a corpus has; "" if there are none."""
    present = set(corpus.labels())
    missing = [label for label in labels if label not in present]
    if not missing:
        return ""
    names = ", ".join(map(repr, missing[:MAX_CLASSES_SHOWN])) + ", …" * (len(missing) > MAX_CLASSES_SHOWN)
    return f"the class {names}" if len(missing) == 1 else f"any of {len(missing)} classes: {names}"
