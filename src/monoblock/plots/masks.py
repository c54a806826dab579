"""Draw attention masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monoblock.nn.masks import Mask, arange_positions
from monoblock.plots.figure import create_figure, save_figure


def save_masks(masks: Sequence[tuple[str, Mask]], length: int, path: Path) -> Path:
    """Draw masks over `length` tokens side by side; `masks` are (title, mask) pairs.

    A cell is dark where a query (row) may attend to a key (column).
    """
    return save_figure(draw_masks(masks, length), path)


def draw_masks(masks: Sequence[tuple[str, Mask]], length: int, *, note: str = "") -> Any:
    """Draw masks as `save_masks` does, and return the figure; `note` follows the legend."""
    figure = create_figure((3.0 * len(masks) + 0.6, 4.1))
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    positions = arange_positions(length)
    for axis, (title, mask) in zip(axes, masks, strict=True):
        axis.imshow(mask.dense(positions, positions)[0, 0].numpy(), cmap="Blues", vmin=0, vmax=1.3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("key: position attended to", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("query: position that attends", fontsize=8)
    figure.suptitle(f"dark: may attend{note}", fontsize=9)
    return figure
