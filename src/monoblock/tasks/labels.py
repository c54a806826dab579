"""Functions on class labels, shared by the classification of texts, images and words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from monoblock.data.corpora.load import Corpus
from monoblock.errors import InputError, did_you_mean


class Prediction(NamedTuple):
    label: str
    probability: float


def top_predictions(labels: Sequence[str], probabilities: Tensor, top: int) -> list[Prediction]:
    """Return the `top` most probable labels, best first; `probabilities` has the shape (classes,)."""
    values, indices = probabilities.topk(min(top, len(probabilities)))
    return [Prediction(labels[index], value) for index, value in zip(indices.tolist(), values.tolist(), strict=True)]


def label_to_id(labels: Sequence[str]) -> dict[str, int]:
    return {label: index for index, label in enumerate(labels)}


def check_labels(corpus: Corpus, rows: Iterable[Sequence[str]], labels: Sequence[str]) -> None:
    """Raise InputError if a label in `rows` is not one of `labels`, the labels of the model.

    rows: the labels of each row of the corpus.
    """
    known = set(labels)
    for number, row in enumerate(rows, 1):
        unknown = next((label for label in row if label not in known), None)
        if unknown is not None:
            listed = f"{', '.join(list(labels)[:8])}{' …' * (len(labels) > 8)}"
            raise InputError(
                f"{corpus.name}, split {corpus.split}, row {number}: the label {unknown!r} was not seen in training"
                f"{did_you_mean(unknown, labels)}; the labels of the model are {listed}"
            )
