"""Draw attention weights: one head with its tokens, all heads of a model, and image patches over the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.plots.figure import create_figure
from monoblock.plots.tokens import check_length, label_axis

WEIGHT_COLORS = "cividis"  # its lightness grows steadily, and it looks the same to the colour-blind
MASKED = "#d8d8d8"
CELL_INCHES, MIN_SIDE, MAX_SIDE = 0.26, 2.4, 16.0  # of the map of one head
TILE_INCHES, MAX_TILE_PIXELS = 0.95, 96  # of a head in the grid
MAX_LABELLED = 40  # tokens of the maps of a layer that are labelled with their tokens
MAX_LINEAR = 100  # tokens of a map whose colours are linear; weights that spread over more are drawn by their root
Array = NDArray[np.floating[Any]]
MaskArray = NDArray[np.bool_]


def draw_attention(
    weights: Array, queries: Sequence[str], keys: Sequence[str], title: str, *, mask: MaskArray | None = None
) -> Any:
    """Draw the weights (T, S) of one head: a row is a query, a column a key; cells where `mask` is False are grey."""
    from matplotlib.colors import PowerNorm

    check_length(max(len(queries), len(keys)))
    height, width = (min(MAX_SIDE, max(MIN_SIDE, CELL_INCHES * len(tokens))) for tokens in (queries, keys))
    if len(queries) == len(keys):
        height = width = max(height, width)
    figure = create_figure((width + 2.2, height + 1.7))
    axis = figure.subplots()
    is_long = max(weights.shape) > MAX_LINEAR
    scale = PowerNorm(0.5 if is_long else 1.0, vmin=0, vmax=float(weights.max()))
    image = axis.imshow(_hide(weights, mask), cmap=_colors(), norm=scale, aspect="auto", interpolation="nearest")
    label = "attention weight (square-root scale)" if is_long else "attention weight"
    bar = figure.colorbar(image, ax=axis, shrink=0.7, pad=0.02, label=label)
    bar.ax.tick_params(labelsize=8)
    axis.set_title(title, fontsize=11, parse_math=False)
    axis.set_xlabel("key: the token attended to", fontsize=9)
    axis.set_ylabel("query: the token that attends", fontsize=9)
    label_axis(axis, "y", queries, height)
    label_axis(axis, "x", keys, width)
    return figure


def draw_layer(
    weights: Array, queries: Sequence[str], keys: Sequence[str], title: str, *, mask: MaskArray | None = None
) -> Any:
    """Draw the weights (H, T, S) of all heads of a layer, each with its tokens and on its own scale from 0."""
    columns = min(4, len(weights))
    rows = -(-len(weights) // columns)
    height, width = (max(1.6, 0.17 * len(tokens)) for tokens in (queries, keys))
    figure = create_figure((columns * width + 2.4, rows * (height + 0.3) + 1.6))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for number, axis in enumerate(axes.flat):
        if number >= len(weights):
            axis.axis("off")
            continue
        scaled = weights[number] / max(float(weights[number].max()), 1e-9)
        image = axis.imshow(_hide(scaled, mask), cmap=_colors(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axis.set_title(f"head {number}", fontsize=9)
        label_axis(axis, "y", queries, height)
        label_axis(axis, "x", keys, width)
    figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, label="weight / largest weight of the head")
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("key: the token attended to", fontsize=9)
    figure.supylabel("query: the token that attends", fontsize=9)
    return figure


def _colors() -> Any:
    """Return the colours of weights from 0 to 1; MASKED below 0, and white for NaN, between maps."""
    from matplotlib import colormaps

    return colormaps[WEIGHT_COLORS].with_extremes(under=MASKED, bad="white")


def _hide(weights: Array, mask: MaskArray | None) -> Array:
    """Return the weights with -1 where the mask is False."""
    return weights if mask is None else np.where(mask, weights, -1.0)


def draw_head_grid(layers: Mapping[str, Array], title: str, *, mask: Mapping[str, MaskArray] | None = None) -> Any:
    """Draw all heads: a row for each layer, a column for each head.

    layers: weights (H, T, S) by the name of the layer.  Each head is drawn on its own scale from 0 to its largest
    weight, since a head that spreads its weight over 400 tokens would else be black.
    """
    heads = max(weights.shape[0] for weights in layers.values())
    check_length(max(max(weights.shape[1:]) for weights in layers.values()))
    tiles = {name: [_shrink(head) for head in weights] for name, weights in layers.items()}
    rows, columns = (max(tile[0].shape[axis] for tile in tiles.values()) for axis in (0, 1))
    gap = max(1, round(0.06 * max(rows, columns)))
    canvas = np.full((len(tiles) * (rows + gap) - gap, heads * (columns + gap) - gap), np.nan)
    for row, (name, maps) in enumerate(tiles.items()):
        visible = None if mask is None or name not in mask else _shrink(mask[name].astype(float)) > 0
        for column, tile in enumerate(maps):
            top, left = row * (rows + gap), column * (columns + gap)
            scaled = _hide(tile / max(float(tile.max()), 1e-9), visible)
            canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = scaled
    ratio = rows / columns
    figure = create_figure((max(4.5, heads * TILE_INCHES + 1.8), max(3.2, len(tiles) * TILE_INCHES * ratio + 1.4)))
    axis = figure.subplots()
    image = axis.imshow(canvas, cmap=_colors(), vmin=0, vmax=1, aspect="equal", interpolation="nearest")
    figure.colorbar(image, ax=axis, shrink=0.6, pad=0.02, label="weight / largest weight of the head")
    axis.set_title(title, fontsize=11, parse_math=False)
    axis.set_xticks([n * (columns + gap) + columns / 2 for n in range(heads)], range(heads), fontsize=9)
    axis.set_yticks([n * (rows + gap) + rows / 2 for n in range(len(tiles))], list(tiles), fontsize=9)
    axis.set_xlabel("head (in each map: rows are queries, columns are keys)", fontsize=9)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure


def _shrink(weights: Array) -> Array:
    """Reduce a map to at most MAX_TILE_PIXELS in each direction; a pixel is the largest weight of its cells."""
    for axis in (0, 1):
        size = weights.shape[axis]
        if size > MAX_TILE_PIXELS:
            starts = np.unique(np.linspace(0, size, MAX_TILE_PIXELS, endpoint=False).astype(int))
            weights = np.maximum.reduceat(weights, starts, axis=axis)
    return weights


def draw_patch_attention(pixels: Array, heads: Array, title: str, *, first: int) -> Any:
    """Draw over an image how strongly each of its patches is attended to, one picture for each head.

    pixels: (channels, height, width), from 0 to 1.
    heads: (H, S) weights of one query, such as the class token; patches begin at index `first`.
    """
    side = round((heads.shape[1] - first) ** 0.5)
    columns = min(6, len(heads) + 1)
    rows = -(-(len(heads) + 1) // columns)
    figure = create_figure((1.9 * columns, 2.1 * rows + 0.6))
    figure.suptitle(title, fontsize=11)
    picture = np.moveaxis(np.clip(pixels, 0, 1), 0, -1)
    gray = picture.mean(-1)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.axis("off")
    axes[0].imshow(picture if picture.shape[-1] == 3 else gray, cmap="gray", vmin=0, vmax=1)
    axes[0].set_title("the image", fontsize=9)
    extent = (-0.5, gray.shape[1] - 0.5, gray.shape[0] - 0.5, -0.5)
    for number, (axis, row) in enumerate(zip(axes[1:], heads, strict=False)):
        grid = row[first:].reshape(side, side)
        axis.imshow(gray, cmap="gray", vmin=0, vmax=1)
        axis.imshow(grid, cmap=WEIGHT_COLORS, alpha=0.65, extent=extent, interpolation="nearest", vmin=0)
        share = f": {row[first:].sum():.0%} on patches" if first else ""
        axis.set_title(f"head {number}{share}", fontsize=8)
    return figure
