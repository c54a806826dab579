"""The tables and the conclusion of an experiment, as text, JSON, a plot, and a page of benchmarks/results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monoblock.errors import ConfigError, FileError
from monoblock.experiments.frame.experiment import Experiment
from monoblock.experiments.frame.results import Result, read_results
from monoblock.experiments.frame.rules import Conclusion
from monoblock.experiments.frame.settings import CORPUS, SPEED_KEYS, find_stand_in, own_changes
from monoblock.metrics.table import format_measure
from monoblock.plots.arms import ArmCurves, ArmValues, draw_arm_curves, draw_arm_points, draw_arm_scatter
from monoblock.plots.figure import save_figure
from monoblock.untrusted_files import write_atomically

MISSING = "–"
MAX_COLUMNS = 12  # of the table of a curve
MAX_DECIMALS = 4  # of a number in the table
MAX_RANGE = 100  # how much larger than the smallest mean of a column the largest may be, to have as many decimals
SMOKE_VERDICT: dict[str, Any] = {"verdict": "inconclusive", "reason": "the numbers of a smoke run mean nothing"}
NOTE = "Note: "  # the beginning of the line of a page with the note


@dataclass(frozen=True)
class Report:
    """The results of an experiment with one group of settings."""

    experiment: Experiment
    results: tuple[Result, ...]
    note: str = ""  # of the person who ran it, about these runs

    @property
    def _measured(self) -> list[str]:
        """The arms that have results, in the order of the experiment."""
        found = {result.arm for result in self.results}
        return [arm.name for arm in self.experiment.arms if arm.name in found]

    @property
    def arms(self) -> list[str]:
        """The arms that have results, and the rows that follow from several arms, such as a fit."""
        return list(self.by_seed())

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(result.machine for result in self.results))

    def by_machine(self) -> list[Report]:
        """Return one report for each machine, if the results depend on it; else this report."""
        if not self.experiment.is_timed:
            return [self]
        groups = {machine: [r for r in self.results if r.machine == machine] for machine in self.machines}
        return [Report(self.experiment, tuple(group), self.note) for group in groups.values()]

    def by_seed(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the metrics of every arm and seed, and what follows from several arms; the last machine counts."""
        found: dict[str, dict[int, dict[str, Any]]] = {
            arm: {result.seed: result.metrics for result in self.results if result.arm == arm} for arm in self._measured
        }
        if self.experiment.summarize is not None:
            for arm, seeds in self.experiment.summarize(found).items():
                found[arm] = {seed: dict(metrics) for seed, metrics in seeds.items()}
        return found

    def values(self, arm: str, metric: str, at: str | None = None) -> list[float]:
        """Return the values of a metric, or of a point of a curve, for the seeds of an arm."""
        found = [metrics.get(metric) for metrics in self.by_seed().get(arm, {}).values()]
        if at is not None:
            found = [value.get(at) if isinstance(value, Mapping) else None for value in found]
        return [value for value in found if isinstance(value, int | float)]

    def count_not_finite(self, arm: str, metric: str) -> int:
        """Return for how many seeds of an arm a metric has no finite number, as after a run that diverged."""
        return sum(metric in metrics and metrics[metric] is None for metrics in self.by_seed().get(arm, {}).values())

    def conclusions(self) -> list[Conclusion]:
        """Return what the rules say; a rule with a condition is inconclusive unless the condition is confirmed."""
        results = self.by_seed()
        found = [
            rule.conclude(results).apply_condition(None if rule.condition is None else rule.condition.conclude(results))
            for rule in self.experiment.rules
        ]
        if not self.about()["smoke"]:
            return found
        return [one if one.verdict == "not measured" else replace(one, **SMOKE_VERDICT) for one in found]

    # -- tables -------------------------------------------------------------------------------------------------------

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return the columns and the rows of the main table: mean and deviation of every arm."""
        columns = [name for name in self.experiment.columns if any(self.values(arm, name) for arm in self.arms)]
        specs = {name: _common_spec([self.values(arm, name) for arm in self.arms]) for name in columns}
        rows: list[list[object]] = [
            [arm, len(self.by_seed()[arm]), *(self._cell(arm, name, specs[name]) for name in columns)]
            for arm in self.arms
        ]
        return ["arm", "seeds", *columns], rows

    def _cell(self, arm: str, name: str, spec: str | None) -> str:
        diverged = self.count_not_finite(arm, name)
        return format_mean(name, self.values(arm, name), spec) + (f" ({diverged} not finite)" if diverged else "")

    def points(self, curve: str) -> list[str]:
        """Return the points of a curve that some arm has, by size if they are numbers."""
        maps = [m.get(curve) for seeds in self.by_seed().values() for m in seeds.values()]
        names = list(dict.fromkeys(point for one in maps if isinstance(one, Mapping) for point in one))
        try:
            return sorted(names, key=float)
        except ValueError:
            return names

    def curve_table(self, curve: str) -> tuple[list[str], list[list[object]]]:
        """Return a table with a row for each arm and a column for each point of a curve, or for some of many points."""
        every, label = self.points(curve), self.experiment.curves[curve]
        points = every if len(every) <= MAX_COLUMNS else _spread(self._common_points(curve, every), MAX_COLUMNS)
        label += f" ({len(points)} of {len(every)})" if len(points) < len(every) else ""
        arms = [arm for arm in self.arms if any(self.values(arm, curve, point) for point in points)]
        rows: list[list[object]] = [
            [arm, *(format_mean(curve, self.values(arm, curve, point)) for point in points)] for arm in arms
        ]
        return [label, *points], rows

    def _common_points(self, curve: str, points: list[str]) -> list[str]:
        """Return the points that most arms have: trainings of different length may have logged at other steps."""
        counts = {point: sum(bool(self.values(arm, curve, point)) for arm in self.arms) for point in points}
        return [point for point in points if counts[point] == max(counts.values())]

    def tables(self) -> list[tuple[str, list[str], list[list[object]]]]:
        """Return title, columns and rows of every table that has rows."""
        found = [("", *self.table()), *((curve, *self.curve_table(curve)) for curve in self.experiment.curves)]
        return [table for table in found if table[2] and len(table[1]) > (1 if table[0] else 2)]

    # -- output -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        experiment, rows = self.experiment, []
        for arm in self.arms:
            seeds = self.by_seed()[arm]
            row: dict[str, Any] = {"arm": arm, "seeds": sorted(seeds)}
            for name in experiment.columns:
                values = self.values(arm, name)
                if values:
                    row |= {name: statistics.fmean(values), f"{name}_deviation": _deviation(values)}
            row["values"] = {name: self.values(arm, name) for name in experiment.columns}
            row["curves"] = {
                curve: {
                    point: statistics.fmean(v) for point in self.points(curve) if (v := self.values(arm, curve, point))
                }
                for curve in experiment.curves
            }
            rows.append(row)
        return {
            "experiment": experiment.name,
            "claim": experiment.claim,
            "source": experiment.source,
            "rows": rows,
            "conclusions": [conclusion.to_json() for conclusion in self.conclusions()],
            "about": self.about(),
        }

    @property
    def _representative(self) -> Result | None:
        """The result whose settings are those of the page: the first of an arm that uses the recipe, if any does."""
        uses_recipe = {arm.name: arm.uses_recipe for arm in self.experiment.arms}
        return max(self.results, key=lambda result: uses_recipe.get(result.arm, False), default=None)

    def about(self) -> dict[str, Any]:
        """Return what was measured where: budget, data, seeds, machines and settings."""
        settings = self._representative.settings if self._representative is not None else {}
        set_by_arms = {change.partition("=")[0] for arm in self.experiment.arms for change in arm.changes}
        changes = {change.partition("=")[0]: change for change in settings.get("changes", ())}  # the last one wins
        budget, data = self.experiment.budget_and_data(settings.get("options", {}))
        return {
            "budget": budget,
            "data": data,
            "seeds": sorted({result.seed for result in self.results}),
            "machines": self.machines,
            "recipe": settings.get("recipe"),
            "changes": [change for key, change in changes.items() if key not in set_by_arms | self._varying_keys()],
            "defaults": self._defaults(set_by_arms - self._varying_keys()),
            "overrides": self._overrides(),
            "options": settings.get("options", {}),
            "smoke": bool(settings.get("smoke")),
            "stand_in": find_stand_in(self.experiment, settings.get("changes", ())),
        }

    def _defaults(self, keys: set[str]) -> list[str]:
        """Return the changes of the experiment to these keys that hold for an arm of the page."""
        own = {change.partition("=")[0]: change for change in self.experiment.changes}
        arms = [self.experiment.arm(name) for name in self._measured]
        set_by_arm = [{change.partition("=")[0] for change in arm.changes} for arm in arms]
        return [change for key, change in own.items() if key in keys and any(key not in found for found in set_by_arm)]

    def _varying_keys(self) -> set[str]:
        """Return the keys of the recipe that change only the speed, and that differ between these trials."""
        last = [dict(change.split("=", 1) for change in result.settings.get("changes", ())) for result in self.results]
        return {key for key in SPEED_KEYS if len({changes.get(key) for changes in last}) > 1}

    def _overrides(self) -> list[str]:
        """Return the changes to the recipe that are not the experiment's own but were asked for by a call."""
        experiment, first = self.experiment, self._representative
        if first is None:
            return []
        settings, changes = first.settings, first.settings.get("changes", ())
        arm = next((arm for arm in experiment.arms if arm.name == first.arm), None)
        flags = {"smoke": bool(settings.get("smoke")), "stands_in": bool(find_stand_in(experiment, changes))}
        own = _last_values(own_changes(experiment, arm, settings.get("options", {}), **flags))
        left_out = {CORPUS.removesuffix("="), *SPEED_KEYS}
        used = {key: value for key, value in _last_values(changes).items() if key not in left_out}
        return [f"{key}={value}" for key, value in used.items() if own.get(key) != value]

    def to_markdown(self, picture: str | None = None) -> str:
        """Return the page of results: claim, tables, conclusion by the rules, and how it was measured."""
        experiment = self.experiment
        lines = [f"# {experiment.name}", "", f"Claim ({experiment.source}): {experiment.claim}", ""]
        for report in self.by_machine():
            lines += [f"## {', '.join(report.machines)}", ""] if len(self.by_machine()) > 1 else []
            for title, columns, rows in report.tables():
                lines += [f"**{title}**, by {experiment.curves[title]}", ""] if title else []
                lines += [_row(columns), "|---" * len(columns) + "|", *map(_row, rows), ""]
            exception = ", except where it says otherwise" if any(rule.added_later for rule in experiment.rules) else ""
            lines += [f"Conclusion, by rules fixed before the runs{exception}:", ""]
            lines += [f"- {conclusion.sentence()}" for conclusion in report.conclusions()] + [""]
        lines += [f"![{experiment.name}]({picture})", ""] if picture else []
        lines += self._arms_table()
        lines += [" ".join(self._how_measured()), ""]
        lines += [f"Reading: {experiment.reading}", ""] if experiment.reading else []
        lines += [f"{NOTE}{self.note}"] if self.note else []
        return "\n".join(lines).rstrip() + "\n"

    def _arms_table(self) -> list[str]:
        arms = [self.experiment.arm(name) for name in self._measured]
        changes = [" ".join((*((arm.recipe,) if arm.recipe else ()), *arm.changes)) for arm in arms]
        rows = [[arm.name, arm.about, f"`{text}`" if text else ""] for arm, text in zip(arms, changes, strict=True)]
        return ["| arm | what it is | its recipe and changes |", "|---|---|---|", *map(_row, rows), ""]

    def _how_measured(self) -> list[str]:
        about = self.about()
        sentences = [f"Budget: {about['budget']}. Data: {about['data']}."]
        if about["stand_in"]:
            sentences.append(f"That corpus was not there; the packaged corpus {about['stand_in']} stood in for it.")
        recipe = about["recipe"] or about["options"].get("recipe")
        if recipe or about["changes"]:
            changes = " ".join(about["changes"]) or "none"
            sentences.append(f"Recipe `{recipe}`, changes in all arms: `{changes}`.")
        if about["defaults"]:
            sentences.append(f"Changes in arms that do not set these keys: `{' '.join(about['defaults'])}`.")
        if varying := sorted(self._varying_keys()):
            sentences.append(f"Trials differ in {', '.join(f'`{key}`' for key in varying)}.")
        if about["overrides"]:
            sentences.append(f"The call changed the budget or the model: `{' '.join(about['overrides'])}`.")
        options = [f"{key}={value}" for key, value in about["options"].items() if value not in ("", None)]
        if options:
            sentences.append(f"Options: {', '.join(options)}.")
        seeds = ", ".join(map(str, about["seeds"]))
        several = f"Seeds {seeds}; the deviation is that of the seeds, also in the plot."
        sentences.append(several if len(about["seeds"]) > 1 else f"Seed {seeds}.")
        sentences.append(f"Machine: {'; '.join(about['machines'])}.")
        if about["smoke"]:
            sentences.append("This was a smoke run: its numbers mean nothing.")
        return sentences


def _last_values(changes: Sequence[str]) -> dict[str, str]:
    """Return the value of each key of the recipe; the last one wins."""
    return {key: value for key, _, value in (change.partition("=") for change in changes)}


def _spread(points: list[str], count: int) -> list[str]:
    """Return at most `count` points at equal distances, with the first and the last one."""
    if len(points) <= count:
        return points
    return [points[round(place * (len(points) - 1) / (count - 1))] for place in range(count)]


def format_mean(name: str, values: Sequence[float], spec: str | None = None) -> str:
    """Write the mean, and the standard deviation if there are several values.

    spec: the format of both, as of `format`; by default it follows from the mean.
    """
    if not values:
        return MISSING
    mean = statistics.fmean(values)
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return f"{values[0]:,}"
    spec = _spec(mean) if spec is None else spec
    text = format_measure(name, mean, spec)
    return text if len(values) == 1 else f"{text} ± {format_measure(name, _deviation(values), spec)}"


def _common_spec(arms: Sequence[Sequence[float]]) -> str | None:
    """Return one format for a column: so many decimals that the smallest deviation is not written as 0.

    Return None if the means differ too much in size for one number of decimals.
    """
    means = [abs(statistics.fmean(values)) for values in arms if values]
    sizes = [mean for mean in means if mean]
    if not sizes or max(sizes) >= 1e5 or min(sizes) < 1e-3 or max(sizes) > MAX_RANGE * min(sizes):
        return None
    deviations = [deviation for values in arms if values and (deviation := _deviation(values)) > 0]
    decimals = int(_spec(max(sizes))[1])
    if deviations:
        decimals = max(decimals, min(MAX_DECIMALS, math.ceil(-math.log10(min(deviations)))))
    return f".{decimals}f"


def _spec(mean: float) -> str:
    """Return how many digits a number needs, so that mean and deviation have equally many decimals."""
    size = abs(mean)
    if size >= 1e5 or 0 < size < 1e-3:
        return ".3g"
    return ".0f" if size >= 1000 else ".1f" if size >= 200 else ".2f" if size >= 5 else ".3f" if size >= 0.1 else ".4f"


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


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
