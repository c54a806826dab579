"""Draw numbers by layer: norms, gradients, probes, and the statistics of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoblock.plots.figure import create_figure, drawable, shorten

# Okabe and Ito (2008): told apart by the colour-blind; line styles tell them apart in black and white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAX_PLAIN_RANGE = 1000  # of a logarithmic axis whose ticks are plain numbers
MAX_TEXT_LAYERS, MAX_TEXT_TOKENS = 40, 16  # of a logit lens with its tokens written out


def draw_curves(
    title: str,
    x_label: str,
    y_label: str,
    x: Sequence[Any],
    curves: Mapping[str, Sequence[float]],
    *,
    logarithmic: bool = False,
    level: tuple[str, float] | None = None,
    starts: Mapping[str, int] | None = None,
) -> Any:
    """Draw several curves over the same x.

    x: the names of the points.
    level: the name and the height of a horizontal line.
    starts: the index in x at which a curve begins, if it is not 0.
    """
    figure = create_figure((max(5.5, min(12.0, 0.4 * len(x) + 3)), 3.8))
    axis = figure.subplots()
    for number, (name, values) in enumerate(curves.items()):
        style = {"color": COLORS[number % 7], "linestyle": STYLES[number % 7], "marker": MARKERS[number % 7]}
        start = 0 if starts is None else starts.get(name, 0)
        axis.plot(range(start, start + len(values)), values, label=drawable(name), markersize=4, **style)
    if level is not None:
        axis.axhline(level[1], color="#777777", linewidth=1, label=level[0])
    if logarithmic:  # with plain numbers: 1, 2, 5, 10, …, or powers of ten over a wide range
        from matplotlib.ticker import LogLocator, NullFormatter

        axis.set_yscale("log")
        low, high = axis.get_ylim()
        if high / low < MAX_PLAIN_RANGE:
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
    step = max(1, len(x) // 24)
    turned = {"rotation": 90} if max(len(str(name)) for name in x) * len(x[::step]) > 70 else {}
    axis.set_xticks(range(0, len(x), step), [str(name) for name in x[::step]], fontsize=8, **turned)
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.set_title(title, fontsize=11)
    axis.grid(color="#e4e4e4")
    axis.legend(fontsize=8, loc="best", framealpha=0.9)
    return figure


def draw_lens(
    layers: Sequence[str],
    tokens: Sequence[str],
    predictions: Sequence[Sequence[str]],
    probabilities: Any,
) -> Any:
    """Draw the logit lens: the best token after each layer, coloured by its probability, (layers, T).

    With many tokens only the last ones are drawn, since the predictions are written in the cells.
    """
    first = max(0, len(tokens) - MAX_TEXT_TOKENS)
    step = -(-len(layers) // MAX_TEXT_LAYERS)
    rows = list(range(len(layers) - 1, -1, -step))[::-1]
    values = np.asarray(probabilities)[rows][:, first:]
    words = [[drawable(shorten(token))[:9] for token in predictions[row][first:]] for row in rows]
    count = len(tokens) - first
    figure = create_figure((max(4.5, 0.72 * count + 2.4), max(2.6, 0.27 * len(rows) + 1.9)))
    axis = figure.subplots()
    image = axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, ax=axis, label="probability of the predicted token", pad=0.02)
    for row, texts in enumerate(words):
        for column, text in enumerate(texts):
            color = "black" if values[row, column] > 0.5 else "white"
            axis.text(column, row, text, ha="center", va="center", fontsize=7, color=color, parse_math=False)
    axis.set_yticks(range(len(rows)), [layers[row] for row in rows], fontsize=8)
    labels = [drawable(shorten(token)) for token in tokens[first:]]
    axis.set_xticks(range(count), labels, rotation=60, ha="right", fontsize=8, parse_math=False, rotation_mode="anchor")
    note = f" (the last {count} of {len(tokens)} tokens)" if first else ""
    axis.set_title(f"logit lens: the prediction after each layer{note}", fontsize=11)
    axis.set(xlabel="token that was read", ylabel="residual stream after")
    return figure


def draw_head_statistics(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw entropy, distance and shares of every head as maps of layers by heads.

    rows: `HeadStatistics.to_json()` of each head.
    """
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    names = [name.split(".")[1] if name.count(".") > 1 else name for name in layers]  # decoder.3.attention is 3
    heads = max(row["head"] for row in rows) + 1
    panels = (
        ("entropy / its maximum", lambda row: row["entropy"] / max(row["max_entropy"], 1e-9)),
        ("distance / that of uniform attention", lambda row: row["distance"] / max(row["uniform_distance"], 1e-9)),
        ("share on the previous token", lambda row: row["previous"]),
        ("share on the next token", lambda row: row["next"]),
        ("share on the first token", lambda row: row["first"]),
        ("share on the own token", lambda row: row["own"]),
    )
    width, height = max(3.4, 0.24 * heads + 1.6), max(2.0, 0.24 * len(layers) + 1.0)
    figure = create_figure((3 * width, 2 * height + 0.4))
    figure.suptitle("where each head attends to: local heads are dark in the second map", fontsize=11)
    for axis, (title, value) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        table = np.full((len(layers), heads), np.nan)
        for row in rows:
            table[layers.index(row["layer"]), row["head"]] = value(row)
        limit = 1.0 if "distance" not in title else max(1.0, float(np.nanmax(table)))
        image = axis.imshow(table, cmap="cividis", vmin=0, vmax=limit, aspect="auto")
        figure.colorbar(image, ax=axis)
        axis.set_title(title if np.nanmax(table) > 0 else f"{title}: none", fontsize=9)
        axis.set(xlabel="head", ylabel="layer")
        steps = [max(1, size // 12) for size in (heads, len(layers))]
        axis.set_xticks(range(0, heads, steps[0]), range(0, heads, steps[0]), fontsize=8)
        axis.set_yticks(range(0, len(layers), steps[1]), names[:: steps[1]], fontsize=8)
    return figure


def draw_bars(title: str, x_label: str, values: Mapping[str, float], *, unit: str = "", shares: bool = True) -> Any:
    """Draw horizontal bars, with the number beside each, and its share of the total if the values are parts of one."""
    from matplotlib.ticker import MaxNLocator

    total = sum(values.values()) or 1
    figure = create_figure((7.5, 0.34 * len(values) + 1.3))
    axis = figure.subplots()
    names = list(values)
    axis.barh(range(len(names)), list(values.values()), color=COLORS[0], height=0.7)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    for place, value in enumerate(values.values()):
        text = f" {value:,.0f}{unit}" if value >= 100 or float(value).is_integer() else f" {value:.3g}{unit}"
        axis.text(value, place, f"{text}  ({value / total:.1%})" if shares else text, va="center", fontsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_xlim(0, 1.45 * max(values.values(), default=1))
    axis.set_xlabel(x_label)
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
