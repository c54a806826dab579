"""Draw the results of an experiment: bars or curves of several arms, with deviations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoblock.metrics.format import is_fraction
from monoblock.plots.curves import COLORS, MARKERS, STYLES
from monoblock.plots.figure import create_figure

ArmValues = tuple[float, float]  # mean and standard deviation


def draw_arm_bars(title: str, y_label: str, bars: Mapping[str, ArmValues | None], *, logarithmic: bool = False) -> Any:
    """Draw one bar for each arm, with its deviation; an arm without a value has none."""
    names = list(bars)
    figure = create_figure((max(4.5, min(14.0, 1.5 + 0.7 * len(names))), 3.8))
    axis = figure.subplots()
    for place, value in enumerate(bars.values()):
        if value is not None:
            axis.bar(place, value[0], yerr=value[1] or None, color=COLORS[0], ecolor="black", capsize=3)
    axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axis.set_title(title, fontsize=11)
    _format_y(axis, y_label, logarithmic)
    return figure


def draw_arm_curves(
    title: str,
    x_label: str,
    y_label: str,
    points: Sequence[str],
    curves: Mapping[str, Sequence[ArmValues | None]],
    *,
    logarithmic: bool = False,
) -> Any:
    """Draw one curve for each arm over the same points, with deviations as shaded bands."""
    figure = create_figure((7.0, 4.2))
    axis = figure.subplots()
    for number, (name, values) in enumerate(curves.items()):
        style = {"color": COLORS[number % 7], "linestyle": STYLES[(number + number // 7) % 7]}
        there = [(place, *value) for place, value in enumerate(values) if value is not None]
        x, mean, deviation = ([one[index] for one in there] for index in range(3))
        axis.plot(x, mean, marker=MARKERS[number % 7], markersize=4, label=name, **style)
        if any(deviation):
            low = [m - d if not logarithmic or m > d else m for m, d in zip(mean, deviation, strict=True)]
            high = [m + d for m, d in zip(mean, deviation, strict=True)]
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    step = max(1, len(points) // 16)
    axis.set_xticks(range(0, len(points), step), points[::step], fontsize=8)
    axis.set_xlabel(x_label)
    axis.set_title(title, fontsize=11)
    axis.legend(fontsize=7, framealpha=0.9, ncols=1 + (len(curves) > 10))
    _format_y(axis, y_label, logarithmic)
    return figure


def _format_y(axis: Any, label: str, logarithmic: bool) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_ylabel(label)
    axis.grid(axis="y", color="#e4e4e4")
    axis.set_axisbelow(True)
    if logarithmic:
        axis.set_yscale("log")
    elif is_fraction(label):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
