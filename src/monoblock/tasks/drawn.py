"""A picture of mistakes: who is taken for whom, and the mistakes made with the least doubt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import FileError

MOST = 32  # classes whose names and counts are written out
ACROSS = 4  # images beside each other


@dataclass(frozen=True)
class Mistake:
    text: str
    there: str  # the true class
    found: str
    probability: float
    pixels: Any = None  # (channels, height, width), where it is an image

    def told(self) -> dict[str, Any]:
        """As a sample of an evaluation."""
        return {
            "source": self.text,
            "reference": self.there,
            "hypothesis": self.found,
            "probability": round(self.probability, 4),
        }


def save_confusion(counts: NDArray[np.int64], labels: Sequence[str], mistakes: Sequence[Mistake], path: Path) -> Path:
    """The confusion matrix on the left, on the right the worst mistakes: images drawn, texts written out."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FileError("pictures need matplotlib; install monoblock[plot]") from None
    side = min(9.0, 3.5 + 0.28 * len(labels))
    figure = Figure(figsize=(2 * side, side), layout="constrained")  # never pyplot: no window, no global state
    halves: Any = figure.subfigures(1, 2)
    left, right = halves
    _matrix(left.subplots(), counts, labels)
    right.suptitle("worst mistakes: true → said", fontsize=9)
    if mistakes and mistakes[0].pixels is not None:
        _images(right, mistakes)
    else:
        _texts(right.subplots(), mistakes)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as problem:
        raise FileError(f"{path} cannot be drawn: {getattr(problem, 'strerror', None) or problem}") from None
    return path


def check_place(path: Path) -> None:
    """One line for a picture that could not be saved, before anything is measured for it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise FileError("pictures need matplotlib; install monoblock[plot]") from None
    if path.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise FileError(f"{path} has no ending of a picture; write .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise FileError(f"there is no folder {path.parent} to draw {path.name} in; make it first")


def _matrix(axis: Any, counts: NDArray[np.int64], labels: Sequence[str]) -> None:
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(title="share of each true class", xlabel="said", ylabel="true")
    if len(labels) > MOST:
        return
    names = [shorten(label, 16) or label[:16] for label in labels]
    axis.set_xticks(range(len(labels)), names, rotation=90, fontsize=7)
    axis.set_yticks(range(len(labels)), names, fontsize=7)
    for row, column in np.argwhere(counts):
        dark = "white" if shares[row, column] > 0.5 else "black"
        axis.text(column, row, int(counts[row, column]), ha="center", va="center", fontsize=6, color=dark)


def _images(place: Any, mistakes: Sequence[Mistake]) -> None:
    rows = -(-len(mistakes) // ACROSS)
    axes = list(place.subplots(rows, ACROSS, squeeze=False).flat)
    for axis in axes:
        axis.axis("off")
    for axis, mistake in zip(axes, mistakes, strict=False):
        pixels = np.clip(np.moveaxis(np.asarray(mistake.pixels), 0, -1), 0, 1)
        axis.imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{mistake.there} → {mistake.found} {mistake.probability:.0%}", fontsize=8)


def _texts(axis: Any, mistakes: Sequence[Mistake]) -> None:
    axis.axis("off")
    texts = [shorten(one.text.replace("$", " "), 90, placeholder=" …") for one in mistakes]  # $ begins a formula
    rows = zip(mistakes, texts, strict=True)
    lines = [f"{one.there} → {one.found} {one.probability:.0%}\n   {text}" for one, text in rows]
    axis.text(0, 1, "\n".join(lines) or "none", va="top", fontsize=7, transform=axis.transAxes)
