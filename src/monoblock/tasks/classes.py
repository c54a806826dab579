"""How well classes are told apart: accuracy, F1, who is taken for whom, whether probabilities mean what they say.

Shares are percentages, as the field's papers print them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 15  # of the calibration error (Guo et al. 2017)
Numbers = NDArray[np.int64]


class Score(NamedTuple):
    """One class: how much of what was called so is so, how much of it was found, both together, how often it is."""

    precision: float
    recall: float
    f1: float
    there: int


def confusion(found: Sequence[int], there: Sequence[int], classes: int) -> Numbers:
    """(classes, classes): how often each true class (row) was called each class (column)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (np.asarray(there, np.int64), np.asarray(found, np.int64)), 1)
    return counts


def accuracy(counts: Numbers) -> float:
    return 100 * float(np.trace(counts)) / max(1, int(counts.sum()))


def scores(counts: Numbers) -> list[Score]:
    """Precision, recall and F1 of every class; 0 where there is nothing to divide by."""
    right, found, there = np.diag(counts), counts.sum(0), counts.sum(1)
    precision, recall = (100 * right / np.maximum(1, total) for total in (found, there))
    f1 = 200 * right / np.maximum(1, found + there)
    rows = zip(precision, recall, f1, there, strict=True)
    return [Score(float(one), float(other), float(both), int(number)) for one, other, both, number in rows]


def macro_f1(counts: Numbers) -> float:
    """The mean F1 of the classes that occur, in truth or among the answers."""
    seen = (counts.sum(0) + counts.sum(1)) > 0
    values = [score.f1 for score, here in zip(scores(counts), seen, strict=True) if here]
    return float(np.mean(values)) if values else 0.0


def calibration_error(shares: NDArray[np.float64], there: Sequence[int], bins: int = BINS) -> float:
    """How far confidence is from accuracy, in percent: the mean over bins of equal width, weighed by their size."""
    confidence, right = shares.max(-1), shares.argmax(-1) == np.asarray(there)
    # Bins are open on the left, so that a confidence of one belongs to the last.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = [abs(float(np.sum(right[place == one]) - np.sum(confidence[place == one]))) for one in range(bins)]
    return 100 * sum(gaps) / max(1, len(confidence))


def surprise(shares: NDArray[np.float64], there: Sequence[int]) -> NDArray[np.float64]:
    """Minus the logarithm of what the true class was given."""
    return -np.log(np.maximum(shares[np.arange(len(shares)), np.asarray(there, np.int64)], 1e-300))


def worst(shares: NDArray[np.float64], there: Sequence[int], count: int) -> list[int]:
    """The numbers of the mistakes that were made with the least doubt, worst first."""
    wrong = np.flatnonzero(shares.argmax(-1) != np.asarray(there))
    order = np.argsort(-surprise(shares, there)[wrong], kind="stable")
    return [int(number) for number in wrong[order][:count]]


def described(counts: Numbers, labels: Sequence[str]) -> dict[str, Any]:
    """For --json: the matrix, and a row a class."""
    rows = {label: score._asdict() for label, score in zip(labels, scores(counts), strict=True)}
    return {"confusion": {"labels": list(labels), "counts": counts.tolist()}, "classes": rows}
