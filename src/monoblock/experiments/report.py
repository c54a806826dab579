"""The tables and the conclusion of an experiment, as text, JSON, a plot, and a page of benchmarks/results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from monoblock.errors import ConfigError, FileError
from monoblock.experiments.experiment import CORPUS, SPEED_KEYS, Arm, Experiment
from monoblock.experiments.results import Result, read_results
from monoblock.experiments.rules import Conclusion
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

    @cached_property
    def measured(self) -> list[Arm]:
        """The arms that have results, in the order of the experiment."""
        found = {result.arm for result in self.results}
        return [arm for arm in self.experiment.arms if arm.name in found]

    @cached_property
    def by_seed(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The metrics of every arm and seed, and what follows from several arms; the last machine counts."""
        found: dict[str, dict[int, dict[str, Any]]] = {
            arm.name: {one.seed: one.metrics for one in self.results if one.arm == arm.name} for arm in self.measured
        }
        if self.experiment.summarize is not None:
            for name, seeds in self.experiment.summarize(found).items():
                found[name] = {seed: dict(metrics) for seed, metrics in seeds.items()}
        return found

    @property
    def arms(self) -> list[str]:
        """The arms that have results, and the rows that follow from several arms, such as a fit."""
        return list(self.by_seed)

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(result.machine for result in self.results))

    def by_machine(self) -> list[Report]:
        """Return one report for each machine, if the results depend on it; else this report."""
        if not self.experiment.is_timed or not self.results:
            return [self]
        groups = [tuple(one for one in self.results if one.machine == machine) for machine in self.machines]
        return [replace(self, results=group) for group in groups]

    def values(self, arm: str, metric: str, at: str | None = None) -> list[float]:
        """Return the values of a metric, or of a point of a curve, for the seeds of an arm."""
        found = [metrics.get(metric) for metrics in self.by_seed.get(arm, {}).values()]
        if at is not None:
            found = [value.get(at) if isinstance(value, Mapping) else None for value in found]
        return [value for value in found if isinstance(value, int | float)]

    def conclusions(self) -> list[Conclusion]:
        """Return what the rules say."""
        found = [rule.conclude(self.by_seed) for rule in self.experiment.rules]
        if not self.about["smoke"]:
            return found
        return [one if one.verdict == "not measured" else replace(one, **SMOKE_VERDICT) for one in found]

    # -- tables -------------------------------------------------------------------------------------------------------

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return the columns and the rows of the main table: mean and deviation of every arm."""
        columns = [name for name in self.experiment.columns if any(self.values(arm, name) for arm in self.arms)]
        specs = {name: _common_spec([self.values(arm, name) for arm in self.arms]) for name in columns}
        rows: list[list[object]] = []
        for arm, seeds in self.by_seed.items():
            row: list[object] = [arm, len(seeds)]
            for name in columns:
                lost = sum(name in metrics and metrics[name] is None for metrics in seeds.values())  # it diverged
                text = format_mean(name, self.values(arm, name), specs[name])
                row.append(f"{text} ({lost} not finite)" if lost else text)
            rows.append(row)
        return ["arm", "seeds", *columns], rows

    def points(self, curve: str) -> list[str]:
        """Return the points of a curve that some arm has, by size if they are numbers."""
        maps = [m.get(curve) for seeds in self.by_seed.values() for m in seeds.values()]
        names = list(dict.fromkeys(point for one in maps if isinstance(one, Mapping) for point in one))
        try:
            return sorted(names, key=float)
        except ValueError:
            return names

    def curve_table(self, curve: str) -> tuple[list[str], list[list[object]]]:
        """Return a table with a row for each arm and a column for each point of a curve, or for some of many points.

        Those are points that most arms have: trainings of different length may have logged at other steps.
        """
        every, label = self.points(curve), self.experiment.curves[curve]
        points = every
        if len(every) > MAX_COLUMNS:
            counts = {point: sum(bool(self.values(arm, curve, point)) for arm in self.arms) for point in every}
            common = [point for point in every if counts[point] == max(counts.values())]
            count, last = min(len(common), MAX_COLUMNS), len(common) - 1
            points = [common[round(place * last / max(1, count - 1))] for place in range(count)]
        label += f" ({len(points)} of {len(every)})" if len(points) < len(every) else ""
        found = {arm: [self.values(arm, curve, point) for point in points] for arm in self.arms}
        rows: list[list[object]] = [
            [arm, *(format_mean(curve, values) for values in row)] for arm, row in found.items() if any(row)
        ]
        return [label, *points], rows

    def tables(self) -> list[tuple[str, list[str], list[list[object]]]]:
        """Return title, columns and rows of every table that has rows."""
        found = [("", *self.table()), *((curve, *self.curve_table(curve)) for curve in self.experiment.curves)]
        return [table for table in found if table[2] and len(table[1]) > (1 if table[0] else 2)]

    # -- output -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        experiment, rows = self.experiment, []
        for arm, seeds in self.by_seed.items():
            row: dict[str, Any] = {"arm": arm, "seeds": sorted(seeds)}
            for name in experiment.columns:
                if values := self.values(arm, name):
                    row[name], row[f"{name}_deviation"] = _summary(values)
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
            "about": self.about,
        }

    @cached_property
    def about(self) -> dict[str, Any]:
        """What was measured where: budget, data, seeds, machines and settings."""
        experiment = self.experiment
        # The settings of the page are those of the first result of an arm that uses the recipe, if any does.
        uses_recipe = {arm.name: arm.uses_recipe for arm in experiment.arms}
        first = max(self.results, key=lambda result: uses_recipe.get(result.arm, False), default=None)
        settings = {} if first is None else first.settings
        options, changes = settings.get("options", {}), settings.get("changes", ())
        is_smoke, stand_in = bool(settings.get("smoke")), experiment.find_stand_in(changes)
        arm = next((arm for arm in self.measured if first is not None and arm.name == first.arm), None)
        own = _last_values(experiment.own_changes(arm, options, smoke=is_smoke, stands_in=bool(stand_in)))
        used, left_out = _last_values(changes), {CORPUS.removesuffix("="), *SPEED_KEYS}
        set_by_arms = {key for arm in experiment.arms for key in _last_values(arm.changes)}
        in_all_arms = [_last_values(arm.changes).keys() for arm in self.measured]
        budget, data = experiment.budget_and_data(options)
        return {
            "budget": budget,
            "data": data,
            "seeds": sorted({result.seed for result in self.results}),
            "machines": self.machines,
            "recipe": settings.get("recipe"),
            "changes": _words(used, lambda key: key not in set_by_arms | self.varying_keys),
            # The changes of the experiment to keys that some arms set and others do not.
            "defaults": _words(
                _last_values(experiment.changes),
                lambda key: key in set_by_arms - self.varying_keys and any(key not in keys for keys in in_all_arms),
            ),
            # What a call asked for.
            "overrides": _words(used, lambda key: key not in left_out and own.get(key) != used[key]),
            "options": options,
            "smoke": is_smoke,
            "stand_in": stand_in,
        }

    @cached_property
    def varying_keys(self) -> set[str]:
        """The keys of the recipe that change only the speed, and that differ between these trials."""
        found = [_last_values(result.settings.get("changes", ())) for result in self.results]
        return {key for key in SPEED_KEYS if len({changes.get(key) for changes in found}) > 1}

    def to_markdown(self, picture: str | None = None) -> str:
        """Return the page of results: claim, tables, conclusion by the rules, and how it was measured."""
        experiment, reports = self.experiment, self.by_machine()
        lines = [f"# {experiment.name}", "", f"Claim ({experiment.source}): {experiment.claim}", ""]
        exception = ", except where it says otherwise" if any(rule.added_later for rule in experiment.rules) else ""
        for report in reports:
            lines += [f"## {', '.join(report.machines)}", ""] if len(reports) > 1 else []
            for title, columns, rows in report.tables():
                lines += [f"**{title}**, by {experiment.curves[title]}", ""] if title else []
                lines += [*_markdown_table(columns, rows), ""]
            lines += [f"Conclusion, by rules fixed before the runs{exception}:", ""]
            lines += [f"- {conclusion.sentence()}" for conclusion in report.conclusions()] + [""]
        lines += [f"![{experiment.name}]({picture})", ""] if picture else []
        arms = [(arm, " ".join((*((arm.recipe,) if arm.recipe else ()), *arm.changes))) for arm in self.measured]
        rows = [[arm.name, arm.about, f"`{text}`" if text else ""] for arm, text in arms]
        lines += [*_markdown_table(["arm", "what it is", "its recipe and changes"], rows), ""]
        lines += [" ".join(self._how_measured()), ""]
        lines += [f"Reading: {experiment.reading}", ""] if experiment.reading else []
        lines += [f"{NOTE}{self.note}"] if self.note else []
        return "\n".join(lines).rstrip() + "\n"

    def _how_measured(self) -> list[str]:
        about = self.about
        recipe = about["recipe"] or about["options"].get("recipe")
        changes = " ".join(about["changes"]) or "none"
        options = ", ".join(f"{key}={value}" for key, value in about["options"].items() if value not in ("", None))
        seeds, several = ", ".join(map(str, about["seeds"])), len(about["seeds"]) > 1
        sentences = {
            f"Budget: {about['budget']}. Data: {about['data']}.": True,
            f"That corpus was not found; the packaged corpus {about['stand_in']} was used instead.": about["stand_in"],
            f"Recipe `{recipe}`, changes in all arms: `{changes}`.": recipe or about["changes"],
            f"Changes in arms that do not set these keys: `{' '.join(about['defaults'])}`.": about["defaults"],
            f"Trials differ in {', '.join(f'`{key}`' for key in sorted(self.varying_keys))}.": self.varying_keys,
            f"The call changed the budget or the model: `{' '.join(about['overrides'])}`.": about["overrides"],
            f"Options: {options}.": options,
            f"Seeds {seeds}; the deviation is that of the seeds, also in the plot.": several,
            f"Seed {seeds}.": not several,
            f"Machine: {'; '.join(about['machines'])}.": True,
            "This was a smoke run: its numbers mean nothing.": about["smoke"],
        }
        return [sentence for sentence, holds in sentences.items() if holds]


def _last_values(changes: Iterable[str]) -> dict[str, str]:
    """Return the value of each key of the recipe; the last one wins."""
    return {key: value for key, _, value in (change.partition("=") for change in changes)}


def _words(values: Mapping[str, str], is_shown: Any) -> list[str]:
    return [f"{key}={value}" for key, value in values.items() if is_shown(key)]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" if row else "|---" * len(columns) + "|" for row in (columns, (), *rows)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def format_mean(name: str, values: Sequence[float], spec: str | None = None) -> str:
    """Write the mean, and the standard deviation if there are several values.

    spec: the format of both, as of `format`; by default it follows from the mean.
    """
    if not values:
        return MISSING
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return f"{values[0]:,}"
    mean, deviation = _summary(values)
    spec = _spec(mean) if spec is None else spec
    text = format_measure(name, mean, spec)
    return text if len(values) == 1 else f"{text} ± {format_measure(name, deviation, spec)}"


def _common_spec(arms: Sequence[Sequence[float]]) -> str | None:
    """Return one format for a column: so many decimals that the smallest deviation is not written as 0.

    Return None if the means differ too much in size for one number of decimals.
    """
    found = [_summary(values) for values in arms if values]
    sizes = [abs(mean) for mean, _ in found if mean]
    if not sizes or max(sizes) >= 1e5 or min(sizes) < 1e-3 or max(sizes) > MAX_RANGE * min(sizes):
        return None
    decimals = int(_spec(max(sizes))[1])
    if deviations := [deviation for _, deviation in found if deviation > 0]:
        decimals = max(decimals, min(MAX_DECIMALS, math.ceil(-math.log10(min(deviations)))))
    return f".{decimals}f"


def _spec(mean: float) -> str:
    """Return how many digits a number needs, so that mean and deviation have equally many decimals."""
    size = abs(mean)
    if size >= 1e5 or 0 < size < 1e-3:
        return ".3g"
    return ".0f" if size >= 1000 else ".1f" if size >= 200 else ".2f" if size >= 5 else ".3f" if size >= 0.1 else ".4f"


def _summary(values: Sequence[float]) -> ArmValues:
    """Return mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


# -- plots and pages --------------------------------------------------------------------------------------------------


def plot_report(report: Report, path: Path) -> Path:
    """Save the plot of a report; raise FileError if matplotlib is not there."""
    return save_figure(draw_report(report), path)


def draw_report(report: Report) -> Any:
    """Draw what the experiment declares, with the results of the last machine if they depend on it."""
    experiment, report = report.experiment, report.by_machine()[-1]
    left_out = {arm.name for arm in experiment.arms if not arm.is_plotted}
    arms = [arm for arm in report.arms if arm not in left_out]

    def column(metric: str, at: str | None = None) -> dict[str, ArmValues]:
        """Return a metric of all plotted arms that have it."""
        return {arm: _summary(found) for arm in arms if (found := report.values(arm, metric, at))}

    if experiment.scatter is not None:
        x, y = map(column, experiment.scatter)
        points = {arm: (x[arm][0], y[arm]) for arm in x if arm in y}
        return draw_arm_scatter(experiment.name, experiment.scatter, points)
    panels = []
    for curve, x_label in experiment.curves.items():
        places = report.points(curve)
        columns = [column(curve, place) for place in places]
        drawn = {arm: [one.get(arm) for one in columns] for arm in arms if any(arm in one for one in columns)}
        if drawn:
            panels.append(ArmCurves(x_label, curve, places, drawn, experiment.guides.get(curve)))
    names = experiment.plotted or (() if panels else experiment.columns[:1])
    shown = {name: column(name) for name in names}
    if not panels:
        return draw_arm_points(experiment.name, shown, logarithmic=experiment.logarithmic)
    options: dict[str, Any] = {"logarithmic": experiment.logarithmic, "floor": experiment.floor}
    return draw_arm_curves(experiment.name, panels, shown, **options)


def write_page(report: Report, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.jsonl and, if matplotlib is there, NAME.png; return the files written.

    If the report has no note, that of the page which it replaces is kept.  Raise ConfigError if the file of results has
    trials that are not in the report.
    """
    name = report.experiment.name
    page, lines, picture = (folder / f"{name}.{ending}" for ending in ("md", "jsonl", "png"))
    folder.mkdir(parents=True, exist_ok=True)
    kept = {result.key for result in report.results}
    if lost := [one for one in (read_results([lines], name) if lines.is_file() else ()) if one.key not in kept]:
        arms = ", ".join(dict.fromkeys(result.arm for result in lost))
        raise ConfigError(
            f"{lines} has {len(lost)} results that this call would delete (arms {arms}); name these arms too and add "
            f"--results {lines}, or remove the file"
        )
    written = [page, lines]
    try:
        written.append(plot_report(report, picture))
    except FileError as problem:
        if "matplotlib" not in str(problem):
            raise
    report = report if report.note else replace(report, note=read_note(page))
    write_atomically(page, report.to_markdown(picture.name if picture in written else None))
    write_atomically(lines, "".join(result.to_line() + "\n" for result in report.results))
    return written


def read_note(page: Path) -> str:
    """Return the note of a page, or an empty text."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    return next((line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)), "")
