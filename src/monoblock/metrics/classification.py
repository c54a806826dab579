"""Metrics of classifiers: accuracy, precision, recall, F1, confusion matrix and calibration error.

Accuracy is a fraction from 0 to 1; precision, recall, F1 and the calibration error are percentages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CALIBRATION_BINS = 15  # as in Guo et al. 2017
IntArray = NDArray[np.int64]


class ClassScore(NamedTuple):
    """The scores of one class; `support` is the number of its examples."""

    precision: float
    recall: float
    f1: float
    support: int

    def to_dict(self) -> dict[str, float | int]:
        """Convert to a JSON object; the support is stored under the key "there"."""
        return {"precision": self.precision, "recall": self.recall, "f1": self.f1, "there": self.support}


def confusion_matrix(predictions: Sequence[int], labels: Sequence[int], num_classes: int) -> IntArray:
    """Return a matrix (classes, classes): how often each true class (row) was predicted as each class (column)."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (np.asarray(labels, np.int64), np.asarray(predictions, np.int64)), 1)
    return counts


def accuracy(counts: IntArray) -> float:
    """Compute the fraction of correct predictions from a confusion matrix."""
    return float(np.trace(counts)) / max(1, int(counts.sum()))


def majority_accuracy(labels: Sequence[int]) -> float:
    """Compute the accuracy of always predicting the most frequent class."""
    return int(np.bincount(np.asarray(labels, np.int64), minlength=1).max()) / len(labels)


def class_scores(counts: IntArray) -> list[ClassScore]:
    """Compute precision, recall and F1 of every class from a confusion matrix; a ratio with denominator 0 is 0."""
    correct, predicted, support = np.diag(counts), counts.sum(0), counts.sum(1)
    precision, recall = (100 * correct / np.maximum(1, total) for total in (predicted, support))
    f1 = 200 * correct / np.maximum(1, predicted + support)
    rows = zip(precision, recall, f1, support, strict=True)
    return [ClassScore(float(p), float(r), float(f), int(n)) for p, r, f, n in rows]


def macro_f1(counts: IntArray) -> float:
    """Compute the mean F1 over the classes that occur as a label or as a prediction in a confusion matrix."""
    occurs = (counts.sum(0) + counts.sum(1)) > 0
    values = [score.f1 for score, included in zip(class_scores(counts), occurs, strict=True) if included]
    return float(np.mean(values)) if values else 0.0


def calibration_error(probabilities: NDArray[np.float64], labels: Sequence[int], bins: int = CALIBRATION_BINS) -> float:
    """Compute the expected calibration error in percent (Guo et al. 2017).

    It is the mean of |confidence - accuracy| over confidence bins of equal width, weighted by the number of examples in
    each bin.  `probabilities` has the shape (examples, classes).
    """
    confidence, correct = probabilities.max(-1), probabilities.argmax(-1) == np.asarray(labels)
    # Bins include their right edge, so that a confidence of 1 is in the last bin.
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = [abs(float(np.sum(correct[bin_of == b]) - np.sum(confidence[bin_of == b]))) for b in range(bins)]
    return 100 * sum(gaps) / max(1, len(confidence))


def negative_log_likelihood(probabilities: NDArray[np.float64], labels: Sequence[int]) -> NDArray[np.float64]:
    """Return -log p of the true class of every example."""
    return -np.log(np.maximum(probabilities[np.arange(len(probabilities)), np.asarray(labels, np.int64)], 1e-300))


def most_confident_errors(probabilities: NDArray[np.float64], labels: Sequence[int], count: int) -> list[int]:
    """Return the indices of the `count` wrong predictions that gave the true class the lowest probability.

    The worst prediction comes first.
    """
    wrong = np.flatnonzero(probabilities.argmax(-1) != np.asarray(labels))
    order = np.argsort(-negative_log_likelihood(probabilities, labels)[wrong], kind="stable")
    return [int(index) for index in wrong[order][:count]]


def classification_report(counts: IntArray, class_names: Sequence[str]) -> dict[str, Any]:
    """Return a JSON object with the confusion matrix and the scores of every class, for the report of an evaluation."""
    rows = {label: score.to_dict() for label, score in zip(class_names, class_scores(counts), strict=True)}
    return {"confusion": {"labels": list(class_names), "counts": counts.tolist()}, "classes": rows}
