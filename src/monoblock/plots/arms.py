"""Draw the results of an experiment: points or curves of several arms, with deviations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monoblock.metrics.format import is_fraction
from monoblock.plots.curves import COLORS, MARKERS, STYLES
from monoblock.plots.figure import create_figure

ArmValues = tuple[float, float]  # mean and standard deviation
MAX_PANELS = 3  # curves that are drawn beside each other
MAX_TICKS = 12


class ArmCurves(NamedTuple):
    """One metric of all arms as curves over the same points."""

    x_label: str
    y_label: str
    points: Sequence[str]
    curves: Mapping[str, Sequence[ArmValues | None]]  # by arm; None where an arm has no value


def draw_arm_points(title: str, y_label: str, values: Mapping[str, ArmValues], *, logarithmic: bool) -> Any:
    """Draw the mean of each arm with its deviation; the axis shows the range of the values, not zero."""
    names = list(values)
    figure = create_figure((max(4.5, min(14.0, 1.5 + 0.7 * len(names))), 3.8))
    axis = figure.subplots()
    for place, (mean, deviation) in enumerate(values.values()):
        axis.errorbar(place, mean, yerr=deviation or None, fmt="o", color=COLORS[0], capsize=4, markersize=6)
    axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_title(title, fontsize=11)
    _format_y(axis, y_label, logarithmic)
    return figure


def draw_arm_curves(title: str, panels: Sequence[ArmCurves], *, logarithmic: bool = False) -> Any:
    """Draw a panel for each metric, with one curve for each arm and deviations as shaded bands."""
    shown = panels[:MAX_PANELS]
    figure = create_figure((1.0 + 6.0 * len(shown), 4.2))
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        _draw_curves(axis, panel, logarithmic)
    axes[0].legend(fontsize=7, framealpha=0.9, ncols=1 + (len(shown[0].curves) > 10))
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_curves(axis: Any, panel: ArmCurves, logarithmic: bool) -> None:
    places = _places(panel.points)
    for number, (name, values) in enumerate(panel.curves.items()):
        style = {"color": COLORS[number % 7], "linestyle": STYLES[(number + number // 7) % 7]}
        there = [(place, *value) for place, value in zip(places, values, strict=True) if value is not None]
        if not there:
            continue
        x, mean, deviation = ([one[index] for one in there] for index in range(3))
        marker = MARKERS[number % 7] if len(places) <= MAX_TICKS else None
        axis.plot(x, mean, marker=marker, markersize=4, label=name, **style)
        if any(deviation):
            low = [m - d if not logarithmic or m > d else m for m, d in zip(mean, deviation, strict=True)]
            high = [m + d for m, d in zip(mean, deviation, strict=True)]
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if len(places) <= MAX_TICKS:
        axis.set_xticks(places, panel.points, fontsize=8)
    axis.set_xlabel(panel.x_label)
    _format_y(axis, panel.y_label, logarithmic)


def _places(points: Sequence[str]) -> list[float]:
    """Return where points lie: a few at equal distances, which suits lengths that double; many by their numbers."""
    if len(points) > MAX_TICKS:
        try:
            return [float(point) for point in points]
        except ValueError:
            pass
    return [float(place) for place in range(len(points))]


def _format_y(axis: Any, label: str, logarithmic: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    axis.set_ylabel(label.replace("_", " "))
    axis.grid(axis="y", color="#e4e4e4")
    axis.set_axisbelow(True)
    if logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=_subdivisions(axis)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif is_fraction(label):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _subdivisions(axis: Any) -> tuple[float, ...]:
    """Return at which multiples of powers of ten a logarithmic axis has ticks: the fewer, the more powers it spans."""
    low, high = axis.get_ylim()
    powers = math.log10(high / low) if low > 0 else 1.0
    return (1.0,) if powers > 3 else (1.0, 2.0, 5.0) if powers > 1 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
