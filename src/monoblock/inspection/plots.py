"""Pictures: masks and positional encodings, as files (matplotlib, the `plot` extra) and as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monoblock.config import Sinusoid
from monoblock.errors import FileError
from monoblock.masks import Mask, run
from monoblock.positions import sinusoid

SHADES = " ░▒▓█"


def mask_text(mask: Mask, length: int) -> list[str]:
    """One line a query: a full square for every key it may see."""
    seen = mask.dense(run(length), run(length))[0, 0]
    return ["".join("██" if one else "··" for one in row) for row in seen.tolist()]


def shaded(matrix: Tensor) -> list[str]:
    """A matrix as text, the lowest value blank and the highest full."""
    low, high = matrix.min(), matrix.max()
    levels = ((matrix - low) / (high - low).clamp(min=1e-9) * (len(SHADES) - 1)).round().long()
    return ["".join(SHADES[level] for level in row) for row in levels.tolist()]


def positions_text(length: int, width: int) -> list[str]:
    """The sinusoids of Vaswani et al. 2017: a line a position; the sines, fast ones first, then the cosines."""
    return shaded(sinusoid(torch.arange(length), width, Sinusoid(form="halves")))


def _figure(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FileError("pictures need matplotlib; install monoblock[plot]") from None
    figure = Figure(figsize=size, layout="constrained")  # never pyplot: no window, no global state
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def save_masks(masks: Sequence[tuple[str, Mask]], length: int, path: Path) -> Path:
    """Masks side by side: dark where a query (row) may see a key (column)."""
    figure, axes = _figure(len(masks), (3.0 * len(masks), 3.4))
    for axis, (title, mask) in zip(axes, masks, strict=True):
        axis.imshow(mask.dense(run(length), run(length))[0, 0], cmap="Blues", vmin=0, vmax=1.3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("key")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("query")
    figure.savefig(path, dpi=130)
    return path


def save_positions(length: int, width: int, path: Path) -> Path:
    """The encoding itself, and how alike two places are by their distance."""
    waves = sinusoid(torch.arange(length), width, Sinusoid())
    alike = torch.nn.functional.cosine_similarity(waves[:1], waves, dim=-1)
    figure, (left, right) = _figure(2, (9.0, 3.6))
    shown = left.imshow(waves, aspect="auto", cmap="RdBu")
    figure.colorbar(shown, ax=left)
    left.set(title="sinusoidal positions", xlabel="dimension", ylabel="position")
    right.plot(alike)
    right.set(title="similarity of two places", xlabel="distance", ylabel="cosine")
    figure.savefig(path, dpi=130)
    return path
