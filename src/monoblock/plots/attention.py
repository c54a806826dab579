"""Draw attention weights: one head with its tokens, all heads of a model, and image patches over the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.plots.figure import DPI, MIN_SPACING, check_length, choose_labels, create_figure, label_axis

Array = NDArray[np.floating[Any]]
MaskArray = NDArray[np.bool_]
WEIGHT_COLORS = "cividis"  # its lightness grows steadily, and it looks the same to the colour-blind
MASKED = "#d8d8d8"
CELL_INCHES, MIN_SIDE, MAX_SIDE = 0.26, 2.4, 16.0  # of the map of one head
MAX_LAYER_SIDE = 5.3  # of a head among those of its layer
MIN_TILE, MAX_TILE, TILES_INCHES, TILE_PIXELS = 1.3, 2.2, 9.0, 100  # of a head in the grid: inches, pixels per inch
TILE_GAP, NOTE_INCHES, BAR_INCHES = 0.07, 0.18, 3.6
MAX_LABELLED = 40  # tokens of a map that is coloured by the largest weight; longer ones by uniform attention
LEAST_RATIO, MOST_RATIO = 0.1, 100.0  # of a weight and that of uniform attention, from dark to bright
MAX_LINEAR = 100  # tokens of a map whose colours are linear; weights that spread over more are drawn by their root


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
    image = axis.imshow(hide(weights, mask), cmap=_colors(), norm=scale, aspect="auto", interpolation="nearest")
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
    """Draw the weights (H, T, S) of all heads of a layer, each with its tokens; `choose_scale` colours them."""
    check_length(max(weights.shape[1:]))
    columns = min(4, len(weights))
    rows = -(-len(weights) // columns)
    height, width = (min(MAX_LAYER_SIDE, max(1.6, 0.17 * len(tokens))) for tokens in (queries, keys))
    scale = choose_scale(max(weights.shape[1:]))
    figure = create_figure((columns * width + 2.6, rows * (height + 0.3) + 1.6))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    extent = (-0.5, len(keys) - 0.5, len(queries) - 0.5, -0.5)
    for number, axis in enumerate(axes.flat):
        if number >= len(weights):
            axis.axis("off")
            continue
        values = reduce_map(scale.apply(weights[number], mask), round(DPI * max(height, width)))
        image = axis.imshow(values, extent=extent, **_image_options())
        axis.set_title(f"head {number}", fontsize=9)
        label_axis(axis, "y", queries, height)
        label_axis(axis, "x", keys, width)
    _add_bar(figure, image, axes, scale, rows * height, "right")
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.supxlabel("key: the token attended to", fontsize=9)
    figure.supylabel("query: the token that attends", fontsize=9)
    return figure


def _colors() -> Any:
    """Return the colours of values from 0 to 1; MASKED below 0, and white for NaN, between maps."""
    from matplotlib import colormaps

    return colormaps[WEIGHT_COLORS].with_extremes(under=MASKED, bad="white")


def _image_options() -> dict[str, Any]:
    return {"cmap": _colors(), "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}


def _add_bar(figure: Any, image: Any, axes: Any, scale: Scale, inches: float, side: str, pad: float = 0.02) -> None:
    """Add the bar of a scale at one side of maps, which is `inches` long."""
    options = {"location": side, "anchor": (0, 1), "shrink": min(0.9, BAR_INCHES / inches), "pad": pad}
    bar = figure.colorbar(image, ax=axes, aspect=18, **options)
    bar.set_label(scale.label, fontsize=9)
    bar.set_ticks(list(scale.ticks), labels=list(scale.ticks.values()))
    bar.ax.tick_params(labelsize=8)


def draw_head_grid(
    layers: Mapping[str, Array],
    title: str,
    *,
    mask: Mapping[str, MaskArray] | None = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Draw all heads: a row for each layer, a column for each head; `choose_scale` colours them.

    layers: weights (H, T, S) by the name of the layer.
    queries, keys: the tokens, of which as many are labelled as there is room for; without them, positions are.
    notes: a word or two above each head, by the name of the layer.
    """
    T, S = (max(weights.shape[axis] for weights in layers.values()) for axis in (1, 2))
    check_length(max(T, S))
    heads, scale = max(weights.shape[0] for weights in layers.values()), choose_scale(max(T, S))
    width = min(MAX_TILE, max(MIN_TILE, TILES_INCHES / heads))
    height = width * min(2.0, max(0.5, T / S))
    size = round(TILE_PIXELS * max(width, height))
    rows, columns = min(T, size), min(S, size)
    space = TILE_GAP if notes is None else NOTE_INCHES
    gaps = max(1, round(space / height * rows)), max(1, round(TILE_GAP / width * columns))
    tops = [row * (rows + gaps[0]) for row in range(len(layers))]
    lefts = [column * (columns + gaps[1]) for column in range(heads)]
    canvas = np.full((tops[-1] + rows, lefts[-1] + columns), np.nan)
    for top, (name, weights) in zip(tops, layers.items(), strict=True):
        for left, head in zip(lefts, weights, strict=False):
            tile = reduce_map(scale.apply(head, None if mask is None else mask.get(name)), size)
            canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    inches = canvas.shape[0] * height / rows, canvas.shape[1] * width / columns
    figure = create_figure((max(5.0, inches[1] + 2.2), max(3.4, inches[0] + 2.7)))
    axis = figure.subplots()
    image = axis.imshow(canvas, **_image_options())
    axis.set_ylim(canvas.shape[0] - 0.5, -0.5 if notes is None else -0.5 - gaps[0])
    _add_bar(figure, image, axis, scale, inches[1], "top", pad=0.15 / inches[0])
    figure.suptitle(title, fontsize=11, parse_math=False)
    axis.set_xticks([left + (columns - 1) / 2 for left in lefts], [f"head {n}" for n in range(heads)], fontsize=9)
    axis.set_yticks([top + (rows - 1) / 2 for top in tops], list(layers), fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    words = [[str(n) for n in range(count)] if words is None else words for count, words in ((T, queries), (S, keys))]
    _label_tiles(axis, "y", words[0], tops, rows, height)
    _label_tiles(axis, "x", words[1], lefts, columns, width)
    for top, name in zip(tops, layers, strict=True):
        for number, note in enumerate(() if notes is None else notes.get(name, ())):
            place = lefts[number] - 0.5, top - 0.5 - 0.02 * rows
            axis.text(*place, f"head {number}: {note}", fontsize=6.2, va="bottom", color="#333333")
    return figure


def _label_tiles(axis: Any, side: str, tokens: Sequence[str], starts: Sequence[int], size: int, inches: float) -> None:
    """Label the tokens of each row or column of maps, on the right or above."""
    places, labels, font = choose_labels(tokens, inches)
    shown = [n for n, place in enumerate(places) if TILE_GAP + inches * (1 - place / len(tokens)) >= MIN_SPACING]
    places, labels = [places[n] for n in shown], [labels[n] for n in shown]  # less those at the edge of the next map
    ticks = [start - 0.5 + (place + 0.5) * size / len(tokens) for start in starts for place in places]
    other = axis.secondary_xaxis("top") if side == "x" else axis.secondary_yaxis("right")
    turned = {"rotation": 90} if side == "x" else {}
    set_ticks = other.set_xticks if side == "x" else other.set_yticks
    set_ticks(ticks, labels * len(starts), fontsize=font, parse_math=False, **turned)
    set_label = other.set_xlabel if side == "x" else other.set_ylabel
    set_label("key: the token attended to" if side == "x" else "query: the token that attends", fontsize=9)
    other.tick_params(length=0, pad=2)
    other.spines[:].set_visible(False)


def draw_patch_attention(pixels: Array, heads: Array, title: str, *, first: int) -> Any:
    """Draw over an image how strongly each of its patches is attended to, one picture for each head.

    Each head is drawn from its smallest weight to its largest, which are written above it.

    pixels: (channels, height, width), from 0 to 1.
    heads: (H, S) weights of one query, such as the class token; patches begin at index `first`.
    """
    side = round((heads.shape[1] - first) ** 0.5)
    columns = min(6, len(heads) + 1)
    rows = -(-(len(heads) + 1) // columns)
    figure = create_figure((1.9 * columns + 1.2, 2.1 * rows + 0.6))
    figure.suptitle(title, fontsize=11)
    picture = np.moveaxis(np.clip(pixels, 0, 1), 0, -1)
    gray = picture.mean(-1)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for axis in axes:
        axis.axis("off")
    axes[0].imshow(picture if picture.shape[-1] == 3 else gray, cmap="gray", vmin=0, vmax=1)
    axes[0].set_title("the image", fontsize=9)
    extent = (-0.5, gray.shape[1] - 0.5, gray.shape[0] - 0.5, -0.5)
    for number, (axis, row) in enumerate(zip(axes[1:], heads, strict=False)):
        patches = row[first:]
        low, high = float(patches.min()), float(patches.max())
        scaled = (patches - low) / max(high - low, 1e-9)
        axis.imshow(gray, cmap="gray", vmin=0, vmax=1)
        options = {"cmap": WEIGHT_COLORS, "vmin": 0, "vmax": 1, "alpha": 0.7, "interpolation": "nearest"}
        image = axis.imshow(scaled.reshape(side, side), extent=extent, **options)
        share = f", {patches.sum():.0%} on patches" if first else ""
        axis.set_title(f"head {number}{share}\n{100 * low:.2g} to {100 * high:.2g} % each", fontsize=8)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02, ticks=[0, 1], label="weight of a patch")
    bar.ax.set_yticklabels(["smallest\nof the head", "largest"], fontsize=8)
    return figure


# -- colours -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How the weights of a head become colours from 0 to 1."""

    label: str
    ticks: Mapping[float, str]
    is_relative: bool  # to uniform attention, by the logarithm; else to the largest weight of the head

    def apply(self, weights: Array, mask: MaskArray | None) -> Array:
        """Return a number from 0 to 1 for each weight (T, S), and -1 where the mask is False."""
        if not self.is_relative:
            return hide(weights / max(float(weights.max()), 1e-9), mask)
        count = weights.shape[1] if mask is None else mask.sum(-1, keepdims=True)  # keys that a query may attend to
        decades = np.log10(np.clip(weights * count, LEAST_RATIO, MOST_RATIO) / LEAST_RATIO)
        return hide(decades / np.log10(MOST_RATIO / LEAST_RATIO), mask)


def choose_scale(length: int) -> Scale:
    """Choose how maps of several heads are coloured, by the number of their tokens.

    A short text: each head from 0 to its largest weight. A long text: how many times a weight is that of uniform
    attention, by the logarithm, since one large weight would else make all others black.
    """
    if length <= MAX_LABELLED:
        places = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        return Scale("weight / largest weight of the head", {place: f"{place:g}" for place in places}, False)
    ticks = {0.0: "1/10 or less", 1 / 3: "1 (uniform)", 2 / 3: "10", 1.0: "100 or more"}
    return Scale("weight / weight of uniform attention (logarithmic)", ticks, True)


def hide(weights: Array, mask: MaskArray | None) -> Array:
    """Return the weights with -1 where the mask is False."""
    return weights if mask is None else np.where(mask, weights, -1.0)


def reduce_map(values: Array, size: int) -> Array:
    """Reduce a map to at most `size` pixels in each direction; a pixel is the largest value of its cells."""
    for axis in (0, 1):
        length = values.shape[axis]
        if length > size:
            starts = np.unique(np.linspace(0, length, size, endpoint=False).astype(int))
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values
