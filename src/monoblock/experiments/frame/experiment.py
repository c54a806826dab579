"""The records that describe an experiment: its arms, its budget, what it measures, and the rules of its conclusion.

An experiment is data, in a file of its own: `EXPERIMENT = Experiment(name=…, claim=…, arms=…, rules=…, measure=…)`.
One trial is one arm with one seed. `measure` runs a trial and yields progress messages and, last, its metrics: numbers,
and curves as dicts from a point to a number. Everything else is the same for all experiments: options, seeds,
resuming, processes, tables, plots and conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from monoblock.experiments.frame.jobs import Job
from monoblock.experiments.frame.rules import Rule

ToyKind = Literal["text", "pairs", ""]
SeedResults = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> metrics
Metrics = dict[str, Any]  # name -> number, or a curve: a dict from a point, such as a length, to a number


@dataclass(frozen=True, kw_only=True)
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


def selection(default: Any) -> Any:
    """Declare an option that only chooses which trials run, or how often each is timed.

    Results with different values of it are shown in one table.
    """
    return field(default=default, metadata={"selects": True})


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of an experiment that has none of its own."""


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
    options: type = NoOptions  # a dataclass of the options key=value; those with `selection()` only choose trials
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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm with one seed, and how it is run; it can be pickled for another process."""

    experiment: str  # the name, under which `table.load_experiment` finds the record
    arm: Arm
    seed: int
    options: Any
    overrides: tuple[str, ...] = ()  # section.key=value from the command line, for all arms
    folder: Path  # of the experiment, with results.jsonl
    work_folder: Path  # of the runs and shared files of trials with the same settings
    data: Path | None = None  # the user's folder of corpora
    smoke: bool = False
    stands_in: bool = False  # the corpus of the recipe is not there, and another one stands in for it
    keep: bool = False  # keep the run folder
    more_results: tuple[Path, ...] = ()  # files of results of other machines

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def run_folder(self) -> Path:
        """The folder in which this trial trains."""
        return self.work_folder / f"seed-{self.seed}" / self.arm.name
