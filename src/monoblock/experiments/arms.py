"""What comparisons share: an arm is trained into a folder (or taken from it), and what came out is a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monoblock.errors import ConfigError, did_you_mean
from monoblock.schema import from_dict
from monoblock.tasks.folder import RECIPE
from monoblock.tasks.pipeline import Pipeline, load
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.run import prepare
from monoblock.training.events import Evaluated, Finished

CARD = "README.md"  # the last file a run writes


@dataclass(frozen=True)
class Row:
    """One arm: its figure for every seed, and what else there is to say."""

    arm: str
    values: tuple[float, ...]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; 0 where there is one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """What a comparison found."""

    name: str
    figure: str  # what the values are: "bleu"
    rows: tuple[Row, ...]
    about: dict[str, Any] = field(default_factory=dict)  # budget, seeds, data: what makes the figures comparable

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Columns and rows; the gain is over the first arm."""
        more = list(dict.fromkeys(key for row in self.rows for key in row.more))
        columns = ["arm", self.figure, "gain", "deviation", *more]
        first = self.rows[0].mean
        return columns, [
            [row.arm, row.mean, row.mean - first, row.spread, *(row.more.get(key) for key in more)] for row in self.rows
        ]

    def to_json(self) -> dict[str, Any]:
        first = self.rows[0].mean
        rows = [
            {"arm": row.arm, self.figure: row.mean, "gain": row.mean - first, "deviation": row.spread}
            | {"values": list(row.values), **row.more}
            for row in self.rows
        ]
        return {"experiment": self.name, "figure": self.figure, "rows": rows, "about": self.about}

    def save(self, folder: Path) -> None:
        (folder / "result.json").write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: Path) -> None:
        """A bar an arm, a whisker for the deviation over seeds."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("pictures need matplotlib; write pip install 'monoblock[plot]'") from None
        figure = Figure(figsize=(1.5 + 0.9 * len(self.rows), 3.6), layout="constrained")
        axes = figure.subplots()
        axes.bar([row.arm for row in self.rows], [row.mean for row in self.rows], color="#4c72b0")
        if any(row.spread for row in self.rows):
            heights, whiskers = [row.mean for row in self.rows], [row.spread for row in self.rows]
            axes.errorbar(range(len(self.rows)), heights, yerr=whiskers, fmt="none", ecolor="black", capsize=3)
        axes.set_ylabel(self.figure)
        axes.tick_params(axis="x", rotation=30)
        figure.savefig(path, dpi=120)


def options(cls: type, given: dict[str, Any]) -> Any:
    """An experiment's own options from key=value words."""
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    for key in given:
        if key not in known:
            raise ConfigError(f"{key}= is no option here{did_you_mean(key, known)}; there is {', '.join(known)}")
    return from_dict(cls, given)


def trained(recipe: Recipe, folder: Path, data: Path | None) -> Iterator[str]:
    """Train an arm, or take it as it lies there; what is yielded is to be told."""
    if (folder / CARD).is_file():
        yield f"{folder.name}: taken as it is"
        return
    begun = (folder / RECIPE).is_file()
    run = prepare(recipe, folder, data=data, resume=begun)
    for event in run.events(resume=begun):
        if isinstance(event, Evaluated):
            yield f"{folder.name}: step {event.step}, validation loss {event.metrics.get('val_loss', 0):.4f}"
        elif isinstance(event, Finished):
            yield f"{folder.name}: trained"


def loaded(folder: Path, device: str = "auto") -> Pipeline:
    return load(folder, device=None if device == "auto" else device)


def seeded(recipe: Recipe, seed: int, **changes: Any) -> Recipe:
    """A recipe with another seed, and other data, tokenizer or model parts."""
    parts = {
        name: replace(getattr(recipe, name), **value) if name != "model" else value for name, value in changes.items()
    }
    return replace(recipe, train=replace(recipe.train, seed=seed), **parts)


def listed(words: str, known: Sequence[str]) -> list[str]:
    """A comma-separated list of words, each of them known."""
    found = [word.strip() for word in words.split(",") if word.strip()]
    for word in found:
        if word not in known:
            raise ConfigError(f"no arm {word!r}{did_you_mean(word, known)}; there is {', '.join(known)}")
    return found


def numbers(words: str | int) -> list[int]:
    """Seeds: 1,2,3."""
    try:
        return [int(word) for word in str(words).split(",")]
    except ValueError:
        raise ConfigError(f"seeds={words!r} are no whole numbers; write seeds=1,2,3") from None
