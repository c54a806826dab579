"""Write the results of an experiment to files: a plot, and the page and the lines of benchmarks/results.

The plot shows what the experiment declares: one column over another (`scatter`), or the columns `plotted` of all arms
and its first curves; without curves the default is the first column.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from monoblock.errors import ConfigError, FileError
from monoblock.experiments.frame.report import NOTE, Report
from monoblock.experiments.frame.results import read_results
from monoblock.plots.arms import ArmCurves, ArmValues, draw_arm_curves, draw_arm_points, draw_arm_scatter
from monoblock.plots.figure import save_figure
from monoblock.untrusted_files import write_atomically


def plot_report(report: Report, path: Path) -> Path:
    """Save the plot of a report; raise FileError if matplotlib is not there."""
    return save_figure(draw_report(report), path)


def draw_report(report: Report) -> Any:
    """Draw what the experiment declares, with the results of the last machine if they depend on it."""
    experiment, report = report.experiment, report.by_machine()[-1]
    name, logarithmic = experiment.name, experiment.logarithmic
    if experiment.scatter is not None:
        x, y = (_column(report, column) for column in experiment.scatter)
        return draw_arm_scatter(name, experiment.scatter, {arm: (x[arm][0], y[arm]) for arm in x if arm in y})
    panels = [panel for curve, x_label in experiment.curves.items() if (panel := _curves(report, curve, x_label))]
    names = experiment.plotted or (() if panels else experiment.columns[:1])
    columns = {column: _column(report, column) for column in names}
    if panels:
        return draw_arm_curves(name, panels, columns, logarithmic=logarithmic, floor=experiment.floor)
    return draw_arm_points(name, columns, logarithmic=logarithmic)


def _plotted_arms(report: Report) -> list[str]:
    left_out = {arm.name for arm in report.experiment.arms if not arm.is_plotted}
    return [arm for arm in report.arms if arm not in left_out]


def _column(report: Report, column: str) -> dict[str, ArmValues]:
    """Return a column of all plotted arms that have it."""
    return {arm: _summary(found) for arm in _plotted_arms(report) if (found := report.values(arm, column))}


def _curves(report: Report, curve: str, x_label: str) -> ArmCurves | None:
    """Return a curve of all plotted arms that have it; None if no arm has."""
    points = report.points(curve)
    curves = {
        arm: [_summary(found) if (found := report.values(arm, curve, point)) else None for point in points]
        for arm in _plotted_arms(report)
    }
    drawn = {arm: values for arm, values in curves.items() if any(values)}
    return ArmCurves(x_label, curve, points, drawn, report.experiment.guides.get(curve)) if drawn else None


def write_page(report: Report, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.jsonl and, if matplotlib is there, NAME.png; return the files written.

    If the report has no note, that of the page which it replaces is kept.
    """
    name, written = report.experiment.name, []
    folder.mkdir(parents=True, exist_ok=True)
    _check_nothing_is_lost(report, folder / f"{name}.jsonl")
    picture = folder / f"{name}.png"
    try:
        written.append(plot_report(report, picture))
    except FileError as problem:
        if "matplotlib" not in str(problem):
            raise
    page, lines = folder / f"{name}.md", folder / f"{name}.jsonl"
    report = report if report.note else replace(report, note=read_note(page))
    write_atomically(page, report.to_markdown(picture.name if written else None))
    write_atomically(lines, "".join(result.to_line() + "\n" for result in report.results))
    return [page, lines, *written]


def read_note(page: Path) -> str:
    """Return the note of a page, or an empty text."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    return next((line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)), "")


def _check_nothing_is_lost(report: Report, path: Path) -> None:
    """Raise ConfigError if a file of results has trials that are not in the report, which would replace it."""
    stored = read_results([path], report.experiment.name) if path.is_file() else []
    kept = {result.key for result in report.results}
    lost = [result for result in stored if result.key not in kept]
    if lost:
        arms = ", ".join(dict.fromkeys(result.arm for result in lost))
        raise ConfigError(
            f"{path} has {len(lost)} results that this call would delete (arms {arms}); name these arms too and add "
            f"--results {path}, or remove the file"
        )


def _summary(values: list[float]) -> ArmValues:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
