"""Draw the results of an experiment: points or curves of several arms, with deviations, and a power law that fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from monoblock.metrics.table import ROWS, is_fraction
from monoblock.plots.curves import COLORS, MARKERS, STYLES
from monoblock.plots.figure import create_figure

ArmValues = tuple[float, float]  # mean and standard deviation
MAX_PANELS = 3  # curves that are drawn beside each other
MAX_TICKS = 12
MAX_ARMS_INSIDE = 8  # a longer legend would hide curves, so it is beside the panels
MARGIN = 0.05  # of an axis above its highest value, as in matplotlib


METRIC_LABELS = {row.name: row.label for row in ROWS if row.label} | {
    "bleu_by_ratio": "BLEU, lowercased",
    "bleu_minus_beam": "BLEU minus that of beam",
    "block_parameters": "parameters of the blocks",
    "gradient": "norm of the gradient",
    "largest_weight": "largest attention weight",
    "loss_by_step": "training loss",
    "microseconds_per_token": "µs per token",
    "milliseconds": "ms",
    "pass_milliseconds": "ms per forward and backward pass",
    "peak_bytes": "bytes at the peak",
    "perplexity_sliding": "perplexity, sliding windows",
    "reversal_accuracy": "strings without an error",
    "saved_bytes": "bytes saved for the backward pass",
    "test_perplexity": "perplexity, test split",
    "validation_perplexity": "perplexity, validation split",
    "trained_weight_gradient": "norm of the gradient of the weights, after training",
    "weight_gradient": "norm of the gradient of the weights",
}


class ArmCurves(NamedTuple):
    """One metric of all arms as curves over the same points."""

    x_label: str
    y_label: str
    points: Sequence[str]
    curves: Mapping[str, Sequence[ArmValues | None]]  # by arm; None where an arm has no value
    guide: float | None = None  # thin lines that fall by this factor per point, backwards from the end of each curve


def draw_arm_points(title: str, panels: Mapping[str, Mapping[str, ArmValues]], *, logarithmic: bool) -> Any:
    """Draw a panel for each metric, with the mean and deviation of each arm; axes show the range of values, not zero.

    panels: the values of the arms by metric.
    """
    width = max(1.5 + 0.7 * len(values) for values in panels.values())
    figure = create_figure((max(4.5, min(14.0, len(panels) * width)), 3.8))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (y_label, values) in zip(axes, panels.items(), strict=True):
        _draw_points(axis, y_label, values, logarithmic=logarithmic)
    (axes[0].set_title if len(panels) == 1 else figure.suptitle)(title, fontsize=11)
    return figure


def draw_arm_scatter(title: str, labels: tuple[str, str], points: Mapping[str, tuple[float, ArmValues]]) -> Any:
    """Draw one metric over another on logarithmic axes, a point for each arm, and the power law that fits the means.

    labels: the names of the metrics x and y.
    points: for each arm the mean of x, and mean and deviation of y.
    """
    x_label, y_label = (METRIC_LABELS.get(name, name.replace("_", " ")) for name in labels)
    figure = create_figure((6.5, 4.2))
    axis = figure.subplots()
    for name, (x, value) in points.items():
        _draw_point(axis, x, value)
        axis.annotate(name, (x, value[0]), xytext=(6, 5), textcoords="offset points", fontsize=8)
    places = sorted({x for x, _ in points.values()})
    if len(places) > 2:  # a line through two points would always fit
        exponent, factor = fit_power_law([(x, mean) for x, (mean, _) in points.values()])
        line = [factor * x**exponent for x in places]
        axis.plot(places, line, color=COLORS[1], linewidth=1, label=f"{y_label} ∝ ({x_label})^{exponent:.3g}")
        axis.legend(fontsize=8)
    axis.set_xscale("log")
    axis.set_xlabel(x_label)
    axis.margins(x=0.1)  # room for the name of the last arm
    axis.set_title(title, fontsize=11)
    _format_y(axis, y_label, logarithmic=True)
    return figure


def fit_power_law(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return exponent and factor of y = factor * x^exponent, by least squares of the logarithms."""
    slope, start = statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True))
    return slope, math.exp(start)


def _draw_points(axis: Any, y_label: str, values: Mapping[str, ArmValues], *, logarithmic: bool) -> None:
    for place, value in enumerate(values.values()):
        _draw_point(axis, place, value)
    axis.set_xticks(range(len(values)), list(values), rotation=35, ha="right", fontsize=8)
    axis.set_xlim(-0.5, len(values) - 0.5)
    _format_y(axis, y_label, logarithmic)


def _draw_point(axis: Any, x: float, value: ArmValues) -> None:
    mean, deviation = value
    axis.errorbar(x, mean, yerr=deviation or None, fmt="o", color=COLORS[0], capsize=4, markersize=6)


def draw_arm_curves(
    title: str,
    panels: Sequence[ArmCurves],
    columns: Mapping[str, Mapping[str, ArmValues]] = MappingProxyType({}),
    *,
    logarithmic: bool = False,
    floor: float = 0.0,
) -> Any:
    """Draw a panel for each metric, with one curve for each arm and deviations as shaded bands.

    columns: the values of the arms by metric, for panels of points before those of curves.
    floor: a logarithmic panel that has smaller values starts here, and the legend names the curves that fall below.
    """
    shown = panels[: MAX_PANELS - len(columns)]
    lowest = floor if logarithmic and floor > 0 else -math.inf
    figure = create_figure((1.0 + 6.0 * (len(columns) + len(shown)), 4.2))
    all_axes = figure.subplots(1, len(columns) + len(shown), squeeze=False)[0]
    for axis, (y_label, values) in zip(all_axes, columns.items(), strict=False):
        _draw_points(axis, y_label, values, logarithmic=False)
    axes = all_axes[len(columns) :]
    arms = list(dict.fromkeys(name for panel in shown for name in panel.curves))
    for axis, panel in zip(axes, shown, strict=True):
        _draw_curves(axis, panel, arms, logarithmic, lowest)
    has_bands = any(
        value is not None and value[1] for panel in shown for curve in panel.curves.values() for value in curve
    )
    title_of_legend = "bands: one standard deviation" if has_bands else None
    options = {"fontsize": 7, "title": title_of_legend, "title_fontsize": 7, "handlelength": 3.5}
    if len(arms) <= MAX_ARMS_INSIDE:
        axes[0].legend(framealpha=0.9, **options)
    else:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", **options)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_curves(axis: Any, panel: ArmCurves, arms: list[str], logarithmic: bool, floor: float) -> None:
    """Draw the curves of a panel; the place of an arm in `arms` decides its color, so that it is that of all panels."""
    places = _places(panel.points)
    for name, values in panel.curves.items():
        number = arms.index(name)
        style = {"color": COLORS[number % 7], "linestyle": STYLES[(number + number // 7) % 7]}
        there = [(place, *value) for place, value in zip(places, values, strict=True) if value is not None]
        if not there:
            continue
        x, mean, deviation = ([one[index] for one in there] for index in range(3))
        marker = MARKERS[number % 7] if len(places) <= MAX_TICKS else None
        label = f"{name} (falls below {floor:g})" if min(mean) < floor else name
        axis.plot(x, mean, marker=marker, markersize=4, label=label, **style)
        if any(deviation):
            low = [m - d if not logarithmic or m > d else m for m, d in zip(mean, deviation, strict=True)]
            high = [m + d for m, d in zip(mean, deviation, strict=True)]
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if len(places) <= MAX_TICKS:
        axis.set_xticks(places, panel.points, fontsize=8)
    axis.set_xlabel(panel.x_label)
    if panel.guide is not None:
        ends = {values[-1][0] for values in panel.curves.values() if values[-1] is not None}
        for number, end in enumerate(sorted(ends)):
            heights = [end * panel.guide ** (places[-1] - place) for place in places]
            note = None if number else f"a factor of {panel.guide:g} per {panel.x_label}"  # the first stands for all
            axis.plot(places, heights, color="#808080", linewidth=0.7, zorder=1, label=note)
    points = [value for values in panel.curves.values() for value in values if value is not None]
    highest = max(map(sum, points), default=floor)
    if min((mean for mean, _ in points), default=floor) < floor < highest:
        axis.set_ylim(floor, highest * (highest / floor) ** MARGIN)
    _format_y(axis, panel.y_label, logarithmic)


def _places(points: Sequence[str]) -> list[float]:
    """Return where points lie: a few numbers at their logarithms, unless they have equal distances; 0 before them."""
    try:
        numbers = [float(point) for point in points]
    except ValueError:
        return [float(index) for index in range(len(points))]
    if len(numbers) > MAX_TICKS:
        return numbers
    steps = {round(high - low, 9) for low, high in pairwise(numbers)}
    if len(steps) <= 1 or min(numbers) < 0:
        return [float(index) for index in range(len(numbers))]
    first = math.log2(min(number for number in numbers if number))
    return [math.log2(number) if number else first - 1 for number in numbers]


def _format_y(axis: Any, label: str, logarithmic: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    axis.set_ylabel(METRIC_LABELS.get(label, label.replace("_", " ")))
    axis.grid(axis="y", color="#e4e4e4")
    axis.set_axisbelow(True)
    if logarithmic:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        powers = math.log10(high / low) if low > 0 else 1.0  # of ten; the more there are, the fewer ticks each has
        ticks = (1, 2, 5) if powers > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axis.yaxis.set_major_locator(LogLocator(subs=(1,) if powers > 3 else ticks))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif is_fraction(label):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
