"""Functions shared by the experiments: train an arm, or reuse it if it is trained, and tabulate the results.

An arm is one of the variants that an experiment compares.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monoblock.config.schema import from_dict
from monoblock.errors import ConfigError, did_you_mean
from monoblock.metrics.format import format_cell, format_change, is_fraction
from monoblock.recipes.parse import RECIPE_FILE
from monoblock.recipes.schema import Recipe
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.prepare_run import prepare_run
from monoblock.training.events import EvaluationEvent, FinishedEvent
from monoblock.training.run_lock import lock_run_folder

CARD_FILE = "README.md"  # the last file that a run writes: if it exists, the run is finished


@dataclass(frozen=True)
class ArmResult:
    """The result of one arm: the value of the compared metric for every seed, and extra columns of the table."""

    arm: str
    values: tuple[float, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Return the standard deviation over the seeds; 0 for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True)
class ExperimentResult:
    name: str
    metric: str  # name of the compared metric, such as "bleu"
    rows: tuple[ArmResult, ...]
    about: dict[str, Any] = field(default_factory=dict)  # budget, seeds, data

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return the column names and the rows of the printed table, with accuracies as percentages.

        The gain of an arm is its mean minus the mean of the first arm.
        """
        extra = list(dict.fromkeys(key for row in self.rows for key in row.extra))
        columns = ["arm", self.metric, "gain", "deviation", *extra]
        return columns, [
            [row.arm, *self._cells(row), *(format_cell(key, row.extra.get(key)) for key in extra)] for row in self.rows
        ]

    def _cells(self, row: ArmResult) -> list[object]:
        """Return mean, gain and deviation of an arm as cells of the table."""
        mean, deviation = (format_cell(self.metric, value) for value in (row.mean, row.std))
        gain = row.mean - self.rows[0].mean
        return [mean, format_change(self.metric, gain) if isinstance(mean, str) else gain, deviation]

    def to_json(self) -> dict[str, Any]:
        baseline = self.rows[0].mean
        rows = [
            {"arm": row.arm, self.metric: row.mean, "gain": row.mean - baseline, "deviation": row.std}
            | {"values": list(row.values), **row.extra}
            for row in self.rows
        ]
        return {"experiment": self.name, "figure": self.metric, "rows": rows, "about": self.about}

    def save(self, folder: Path) -> None:
        (folder / "result.json").write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: Path) -> None:
        """Save a bar plot: one bar per arm, with the standard deviation over the seeds."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import PercentFormatter
        except ImportError:
            raise ConfigError("plots need matplotlib; install it with pip install 'monoblock[plot]'") from None
        figure = Figure(figsize=(1.5 + 0.9 * len(self.rows), 3.6), layout="constrained")
        axes = figure.subplots()
        axes.bar([row.arm for row in self.rows], [row.mean for row in self.rows], color="#4c72b0")
        if any(row.std for row in self.rows):
            means, deviations = [row.mean for row in self.rows], [row.std for row in self.rows]
            axes.errorbar(range(len(self.rows)), means, yerr=deviations, fmt="none", ecolor="black", capsize=3)
        axes.set_ylabel(self.metric)
        if is_fraction(self.metric):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.tick_params(axis="x", rotation=30)
        figure.savefig(path, dpi=120)


def parse_options(cls: type, values: dict[str, Any]) -> Any:
    """Build the options of an experiment from key=value arguments; `cls` is the class Options of its module."""
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"this experiment has no option {key}=; it has {', '.join(known)}{did_you_mean(key, known)}"
            )
    return from_dict(cls, values)


def train_arm(recipe: Recipe, folder: Path, data: Path | None) -> Iterator[str]:
    """Train an arm, and write it to a folder; yield progress messages.

    A run that the folder already contains is resumed; if it is finished, nothing is done.
    """
    if (folder / CARD_FILE).is_file():
        yield f"{folder.name}: already trained"
        return
    resume = (folder / RECIPE_FILE).is_file()
    with lock_run_folder(folder):
        run = prepare_run(recipe, folder, data=data, resume=resume)
        for event in run.events(resume=resume):
            if isinstance(event, EvaluationEvent):
                yield f"{folder.name}: step {event.step}, validation loss {event.metrics.get('val_loss', 0):.4f}"
            elif isinstance(event, FinishedEvent):
                yield f"{folder.name}: trained"


def load_arm(folder: Path, device: str = "auto") -> Pipeline:
    return load(folder, device=None if device == "auto" else device)


def with_seed(recipe: Recipe, seed: int, **changes: Any) -> Recipe:
    """Return the recipe with another seed and with changed sections.

    changes: for the sections `data`, `tokenizer` and `task`, the values to change; for `model`, the whole new section.
    """
    sections = {
        name: value if name == "model" else replace(getattr(recipe, name), **value) for name, value in changes.items()
    }
    return replace(recipe, train=replace(recipe.train, seed=seed), **sections)


def parse_arms(words: str, known: Sequence[str]) -> list[str]:
    """Parse a comma-separated list of arms; raise ConfigError for an arm that is not in `known`."""
    arms = [word.strip() for word in words.split(",") if word.strip()]
    for arm in arms:
        if arm not in known:
            raise ConfigError(
                f"this experiment has no arm {arm!r}; its arms are {', '.join(known)}{did_you_mean(arm, known)}"
            )
    return arms


def parse_seeds(words: str | int) -> list[int]:
    """Parse a comma-separated list of seeds."""
    try:
        return [int(word) for word in str(words).split(",")]
    except ValueError:
        raise ConfigError(f"seeds={words!r} is not a list of whole numbers; write seeds=1,2,3") from None


def check_metric(name: str, metrics: dict[str, Any]) -> None:
    """Raise ConfigError if an evaluation did not compute the metric that the experiment compares."""
    if name not in metrics:
        raise ConfigError(f"figure={name} is not a metric of this evaluation; write one of {', '.join(metrics)}")
