"""Write the results of an experiment to files: a plot, and the page and the lines of benchmarks/results.

The plot shows the first curves of the experiment if it has any, otherwise the arms that have its first column.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from monoblock.errors import FileError
from monoblock.experiments.frame.report import Report
from monoblock.interop.atomic_write import write_atomically
from monoblock.plots.arms import ArmCurves, ArmValues, draw_arm_curves, draw_arm_points
from monoblock.plots.figure import save_figure


def plot_report(report: Report, path: Path) -> Path:
    """Save the plot of a report; raise FileError if matplotlib is not there."""
    experiment, report = report.experiment, report.by_machine()[-1]
    panels = [panel for curve, x_label in experiment.curves.items() if (panel := _curves(report, curve, x_label))]
    if panels:
        return save_figure(draw_arm_curves(experiment.name, panels, logarithmic=experiment.logarithmic), path)
    column = experiment.columns[0]
    values = {arm: _summary(found) for arm in report.arms if (found := report.values(arm, column))}
    return save_figure(draw_arm_points(experiment.name, column, values, logarithmic=experiment.logarithmic), path)


def _curves(report: Report, curve: str, x_label: str) -> ArmCurves | None:
    """Return a curve of all arms that have it; None if no arm has."""
    points = report.points(curve)
    curves = {
        arm: [_summary(found) if (found := report.values(arm, curve, point)) else None for point in points]
        for arm in report.arms
    }
    drawn = {arm: values for arm, values in curves.items() if any(values)}
    return ArmCurves(x_label, curve, points, drawn) if drawn else None


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


def _summary(values: list[float]) -> ArmValues:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
