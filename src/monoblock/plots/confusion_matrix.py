"""Draw the confusion matrix of a classifier and its worst mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.plots.figure import create_figure, save_figure

MAX_NAMED_CLASSES = 32  # with more classes, names and counts would not be legible
IMAGES_PER_ROW = 4


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction of a classifier, and the probability that it gave to this prediction."""

    text: str
    label: str  # the true class
    prediction: str
    probability: float
    pixels: Any = None  # (channels, height, width) of an image

    def to_sample(self) -> dict[str, Any]:
        """Convert to a JSON object with the same keys as the samples that an evaluation writes."""
        return {
            "source": self.text,
            "reference": self.label,
            "hypothesis": self.prediction,
            "probability": round(self.probability, 4),
        }


def save_confusion_matrix(
    counts: NDArray[np.int64], labels: Sequence[str], mistakes: Sequence[Mistake], path: Path
) -> Path:
    """Draw the confusion matrix on the left and the worst mistakes, as images or as texts, on the right."""
    side = min(9.0, 3.5 + 0.28 * len(labels))
    figure = create_figure((2 * side, side))
    left, right = figure.subfigures(1, 2)
    _draw_matrix(left.subplots(), counts, labels)
    right.suptitle("worst mistakes: true → predicted", fontsize=9)
    captions = [f"{one.label} → {one.prediction} {one.probability:.0%}" for one in mistakes]
    if mistakes and mistakes[0].pixels is not None:
        axes = list(right.subplots(-(-len(mistakes) // IMAGES_PER_ROW), IMAGES_PER_ROW, squeeze=False).flat)
        for axis in axes:
            axis.axis("off")
        for axis, mistake, caption in zip(axes, mistakes, captions, strict=False):
            pixels = np.clip(np.moveaxis(np.asarray(mistake.pixels), 0, -1), 0, 1)
            axis.imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
            axis.set_title(caption, fontsize=8)
    else:
        texts = [one.text.replace("$", " ") for one in mistakes]  # matplotlib reads $ as mathematics
        lines = [
            f"{caption}\n   {shorten(text, 90, placeholder=' …')}"
            for caption, text in zip(captions, texts, strict=True)
        ]
        axis = right.subplots()
        axis.axis("off")
        axis.text(0, 1, "\n".join(lines) or "none", va="top", fontsize=7, transform=axis.transAxes)
    return save_figure(figure, path)


def _draw_matrix(axis: Any, counts: NDArray[np.int64], labels: Sequence[str]) -> None:
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(title="share of each true class", xlabel="predicted", ylabel="true")
    if len(labels) > MAX_NAMED_CLASSES:
        return
    names = [shorten(label, 16) or label[:16] for label in labels]
    axis.set_xticks(range(len(labels)), names, rotation=90, fontsize=7)
    axis.set_yticks(range(len(labels)), names, fontsize=7)
    for row, column in np.argwhere(counts):
        color = "white" if shares[row, column] > 0.5 else "black"
        axis.text(column, row, int(counts[row, column]), ha="center", va="center", fontsize=6, color=color)
