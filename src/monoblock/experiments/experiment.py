"""The records that describe an experiment: its arms, its budget, what it measures, and the rules of its conclusion.

An experiment is a file of `experiments/library`, `EXPERIMENT = Experiment(name=…, claim=…, arms=…, rules=…)`, whose
first line says what is compared. One trial is one arm with one seed. `measure` runs a trial and yields progress
messages and, last, its metrics: numbers, and curves as dicts from a point to a number. Everything else is the same for
all experiments: options, seeds, resuming, processes, tables, plots and conclusions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from monoblock.config.schema import check_at_least, check_types
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import Rule
from monoblock.experiments.synthetic_data import ToyKind, parse_lengths, toy_path

SeedResults = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> metrics
Metrics = dict[str, Any]  # name -> number, or a curve: a dict from a point, such as a length, to a number
CORPUS = "data.corpus="
# Keys of a recipe that change how long a trial takes: trials that differ in them are compared, and the page names the
# keys. They change what is learned only by rounding, except that translation with train.compile=graphs has batches of
# one shape, and otherwise batches of similar lengths.
SPEED_KEYS = ("train.compile", "train.workers", "train.device")


@dataclass(frozen=True)
class Arm:
    """One of the variants that an experiment compares."""

    name: str
    about: str  # what this arm is, in words
    changes: tuple[str, ...] = ()  # overrides of the recipe, such as "model.norm_place=post"
    recipe: str | None = None  # a recipe instead of that of the experiment
    values: Mapping[str, Any] = field(default_factory=dict)  # what `measure` has to know of the arm
    is_timed: bool = False  # it trains for a given time, so that what changes the speed changes the result
    uses_recipe: bool = True  # False: it trains nothing and reads no corpus, whatever the recipe of the experiment
    is_plotted: bool = True  # False: its numbers cannot be compared with those of the other arms


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options key=value of an experiment, which subclasses add; a whole number is at least 1, or its default 0."""

    def __post_init__(self) -> None:
        check_types(self)
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "lengths" and value != option.default:
                parse_lengths(value)
            elif option.default is None or type(option.default) is int:
                check_at_least(self, 0 if option.default == 0 else 1, option.name)


def selection(default: Any) -> Any:
    """Declare an option that only chooses which trials run, or how often each is timed.

    Results with different values of it are shown in one table.
    """
    return field(default=default, metadata={"selects": True})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    claim: str  # what the documents say, in a sentence
    source: str  # which document says it, as in docs/errata.md: "A, pre-norm; C, pre-norm"
    arms: tuple[Arm, ...]
    measure: Callable[[Trial], Iterator[str | Metrics]]
    budget: str  # what every arm gets, in words
    data: str  # what the arms are trained and measured on, in words
    columns: tuple[str, ...]  # metrics in the table
    rules: tuple[Rule, ...]  # fixed before any run; they yield the conclusion
    curves: Mapping[str, str] = field(default_factory=dict)  # metrics that are curves, and what their points are
    logarithmic: bool = False  # plot on a logarithmic scale
    floor: float = 0.0  # a logarithmic plot of curves that fall below this starts here
    guides: Mapping[str, float] = field(default_factory=dict)  # curves, and a factor per point that thin lines show
    plotted: tuple[str, ...] = ()  # columns in the plot, before its curves; (): the first one if there is no curve
    scatter: tuple[str, str] | None = None  # columns x and y of a plot with logarithmic axes and the line that fits
    recipe: str = ""  # the recipe of all arms without one of their own; "": nothing is trained
    changes: tuple[str, ...] = ()  # overrides of the recipe in all arms: the budget; not of another recipe=NAME
    set_by_measure: tuple[str, ...] = ()  # keys of the recipe that `measure` sets, so that a call cannot
    stand_in: tuple[str, ...] = ()  # further overrides if the corpus of the recipe is not there
    smoke: tuple[str, ...] = ()  # further overrides of a smoke run, with which it takes seconds
    toy: ToyKind = ""  # the toy corpus that replaces the corpus of the recipe in a smoke run; "": none does
    smoke_arms: tuple[str, ...] = ()  # the arms of a smoke run; (): the default arms
    smoke_options: Mapping[str, Any] = field(default_factory=dict)
    default_arms: tuple[str, ...] = ()  # the arms of a call without arms=; (): all
    expand: Callable[[Any, list[str]], list[str]] | None = None  # options that multiply the chosen arms, such as ratios
    seeds: tuple[int, ...] = (1, 2, 3)
    options: type = Options  # a dataclass of the options key=value; those with `selection()` only choose trials
    is_timed: bool = False  # the results depend on the machine, so tables do not mix machines
    before: Callable[[Trial], tuple[Job, ...]] | None = None  # jobs that several trials share, such as a first model
    needs: Callable[[Trial], tuple[tuple[str, int], ...]] | None = None  # (arm, seed) of trials that must come first
    summarize: Callable[[SeedResults], SeedResults] | None = None  # numbers that follow from several arms, as a fit
    check: Callable[[Any, tuple[str, ...]], None] | None = None  # raises ConfigError for options and overrides
    reading: str = ""  # how to read the table, in a paragraph

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def other_recipe(self, options: Mapping[str, Any]) -> str | None:
        """Return the recipe that the option recipe= names, or None if it is the experiment's own or no option."""
        own = next((option.default for option in fields(self.options) if option.name == "recipe"), None)
        name = options.get("recipe", own)
        return None if name == own else name

    def budget_and_data(self, options: Mapping[str, Any]) -> tuple[str, str]:
        """Return both in words; with another recipe they are those of that recipe."""
        other = self.other_recipe(options)
        if other is None:
            return self.budget, self.data
        return f"that of the recipe {other}", f"the corpus of the recipe {other}"

    def own_changes(
        self, arm: Arm | None, options: Mapping[str, Any], *, smoke: bool, stands_in: bool
    ) -> tuple[str, ...]:
        """Return the overrides that the experiment and an arm make in every call with these options; later ones win."""
        changes = self.changes if self.other_recipe(options) is None else ()
        further = self.smoke if smoke else self.stand_in if stands_in else ()
        return (*changes, *further, *(arm.changes if arm is not None else ()))

    def find_stand_in(self, changes: list[str]) -> str | None:
        """Return the corpus that stood in for that of the recipe in a trial with these changes, or None."""
        if not set(self.stand_in) <= set(changes):
            return None
        return next((change.removeprefix(CORPUS) for change in self.stand_in if change.startswith(CORPUS)), None)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm with one seed, and how it is run; it can be pickled for another process."""

    experiment: Experiment
    arm: Arm
    seed: int
    options: Any
    folder: Path  # of the experiment, with results.jsonl
    work_folder: Path  # of the runs and shared files of trials with the same settings
    overrides: tuple[str, ...] = ()  # section.key=value from the command line, for all arms
    data: Path | None = None  # the user's folder of corpora
    smoke: bool = False
    keep: bool = False  # keep the run folder
    more_results: tuple[Path, ...] = ()  # files of results of other machines
    stands_in: bool = False  # the corpus of the recipe is not there, and another one stands in for it

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def seed_folder(self) -> Path:
        return self.work_folder / f"seed-{self.seed}"

    @property
    def run_folder(self) -> Path:
        """The folder in which this trial trains."""
        return self.seed_folder / self.arm.name

    @property
    def recipe(self) -> str:
        """The name of its recipe; "" if it trains nothing."""
        return self.arm.recipe or self.experiment.recipe

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides of the recipe, without the seed; later ones win."""
        toy = self.experiment.toy if self.smoke else ""
        own = self.experiment.own_changes(
            self.arm, self.plain_options, smoke=self.smoke, stands_in=self.stands_in and self.arm.uses_recipe
        )
        return (*((f"{CORPUS}{toy_path(toy, self.folder)}",) if toy else ()), *own, *self.overrides)

    @property
    def plain_options(self) -> dict[str, Any]:
        """The options on which the result depends, as they are after a round trip through JSON."""
        chosen = [one.name for one in fields(self.options) if not one.metadata.get("selects")]
        plain: dict[str, Any] = json.loads(json.dumps({n: getattr(self.options, n) for n in chosen}, default=str))
        return plain

    @property
    def settings(self) -> dict[str, Any]:
        """All that the result depends on, besides arm, seed and machine."""
        changes = list(self.changes)
        settings = {"recipe": self.recipe, "changes": changes, "options": self.plain_options, "smoke": self.smoke}
        if self.arm.is_timed:
            settings["speed"] = [change for change in changes if change.partition("=")[0] in SPEED_KEYS]
        return settings
