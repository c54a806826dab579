"""Read the training and the validation rows of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError
from monoblock.recipes.schema import Recipe


@dataclass(frozen=True)
class CorpusSplits:
    train: Corpus
    valid: Corpus | None
    labels: list[str]  # all labels of the training rows, collected before data.limit is applied
    digests: dict[str, str]  # SHA-256 of the content of each split


def load_splits(
    recipe: Recipe, kinds: Sequence[CorpusKind], folder: Path | None, *, kind: CorpusKind | None = None
) -> tuple[Corpus, Corpus | None]:
    """Read the training and the validation rows of a recipe.

    The validation rows are the last `data.validation_rows` training rows. If that key is 0, they are the split `valid`,
    or None if the corpus has no such split.

    kinds: the kinds of corpus that the task reads.
    folder: the user's folder of corpora.
    kind: the kind of corpus that a path is read as; None infers it from the suffix and `kinds`.
    """
    name, count = recipe.data.corpus, recipe.data.validation_rows
    kind = kind if kind is not None else infer_corpus_kind(name, tuple(kinds), folder=folder)
    train = load_corpus(name, "train", folder=folder, kind=kind)
    if count:
        if count >= len(train):
            raise ConfigError(
                f"data.validation_rows={count} leaves none of the {len(train)} rows to train on; write a smaller number"
            )
        return replace(train, rows=train.rows[:-count]), replace(train, split="valid", rows=train.rows[-count:])
    return train, load_corpus_if_present(name, "valid", folder=folder, kind=kind)
