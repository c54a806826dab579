"""Class labels: predictions, and the indices of labels among those of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from monoblock.data.corpora.load import Corpus
from monoblock.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


class Prediction(NamedTuple):
    label: str
    probability: float


def top_predictions(labels: Sequence[str], probabilities: Tensor, top: int) -> list[Prediction]:
    """Return the `top` most probable labels, best first; `probabilities` has the shape (classes,)."""
    values, indices = probabilities.topk(min(top, len(probabilities)))
    return [Prediction(labels[index], value) for index, value in zip(indices.tolist(), values.tolist(), strict=True)]


def label_to_id(labels: Sequence[str]) -> dict[str, int]:
    return {label: index for index, label in enumerate(labels)}


def class_indices(corpus: Corpus, labels: Sequence[str]) -> list[int]:
    """Return the index in `labels` of the label of each row; raise InputError for a label that is not one of them."""
    names, ids = [str(row.label) for row in corpus.rows], label_to_id(labels)
    check_labels(corpus, ((name,) for name in names), labels)
    return [ids[name] for name in names]


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
