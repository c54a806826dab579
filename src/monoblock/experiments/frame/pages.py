"""Write the results of an experiment to files: a plot, and the page and the lines of benchmarks/results.

The plot shows the first curve of the experiment if it has one, otherwise its first column as bars.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from monoblock.errors import FileError
from monoblock.experiments.frame.report import Report
from monoblock.interop.atomic_write import write_atomically
from monoblock.plots.arms import ArmValues, draw_arm_bars, draw_arm_curves
from monoblock.plots.figure import save_figure


def plot_report(report: Report, path: Path) -> Path:
    """Save the plot of a report; raise FileError if matplotlib is not there."""
    experiment, report = report.experiment, report.by_machine()[-1]
    for curve, x_label in experiment.curves.items():
        points = report.points(curve)
        if points:
            curves = {arm: [_summary(report.values(arm, curve, point)) for point in points] for arm in report.arms}
            drawn = {arm: values for arm, values in curves.items() if any(values)}
            title = f"{experiment.name}: {curve}"
            figure = draw_arm_curves(title, x_label, curve, points, drawn, logarithmic=experiment.logarithmic)
            return save_figure(figure, path)
    column = experiment.columns[0]
    bars = {arm: _summary(report.values(arm, column)) for arm in report.arms}
    figure = draw_arm_bars(experiment.name, column, bars, logarithmic=experiment.logarithmic)
    return save_figure(figure, path)


def write_page(report: Report, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.jsonl and, if matplotlib is there, NAME.png; return the files written."""
    name, written = report.experiment.name, []
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{name}.png"
    try:
        written.append(plot_report(report, picture))
    except FileError as problem:
        if "matplotlib" not in str(problem):
            raise
    page, lines = folder / f"{name}.md", folder / f"{name}.jsonl"
    write_atomically(page, report.to_markdown(picture.name if written else None))
    write_atomically(lines, "".join(result.to_line() + "\n" for result in report.results))
    return [page, lines, *written]


def _summary(values: list[float]) -> ArmValues | None:
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
