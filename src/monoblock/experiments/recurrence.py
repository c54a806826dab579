"""The Transformer beside the LSTM encoder-decoder with additive attention: same data, same steps, as many weights.

The LSTM's width is the one that comes nearest to the Transformer's number of parameters (`recurrent.matching`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoblock.accounting.report import account
from monoblock.config import ModelConfig
from monoblock.errors import ConfigError
from monoblock.experiments.arms import Result, Row, listed, loaded, numbers, seeded, trained
from monoblock.interop.folder import read_config
from monoblock.recurrent import matching
from monoblock.schema import check, check_at_least
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.recipe import Recipe, read
from monoblock.training import metrics

ARMS = ("transformer", "lstm")


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "reverse"
    seeds: str | int = "1"
    arms: str = ",".join(ARMS)
    depth: int = 2  # of the LSTM
    limit: int | None = None  # test sources
    figure: str = "accuracy"

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "depth", "limit")


def run(asked: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | Result]:
    """Train and measure both; the last thing yielded is the result."""
    recipe, arms, seeds = read(asked.recipe, overrides), listed(asked.arms, ARMS), numbers(asked.seeds)
    if recipe.train.objective != "pairs" or recipe.model.get("family") == "lstm":
        raise ConfigError(f"recipe={asked.recipe} is no Transformer for pairs; write recipe=reverse or recipe=multi30k")
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    more: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    for seed in seeds:
        for arm in ARMS if "lstm" in arms else arms:  # the LSTM takes its size from the other
            place = folder / f"seed-{seed}" / arm
            changes = {} if arm == "transformer" else {"model": _lstm(place.with_name("transformer"), recipe, asked)}
            yield from trained(seeded(recipe, seed, **changes), place, data)
            if arm not in arms:
                continue
            pipe = loaded(place, recipe.train.device)
            figures = evaluate(pipe, Asked(data=recipe.data.corpus, folder=data, limit=asked.limit)).figures
            if asked.figure not in figures:
                raise ConfigError(f"figure={asked.figure} is not measured here; there is {', '.join(figures)}")
            found[arm].append(figures[asked.figure])
            more[arm] = {"parameters": account(pipe.model.config).parameters, "seconds": _seconds(place)}
            yield f"{arm}, seed {seed}: {asked.figure} {figures[asked.figure]:.2f}"
    about = {"recipe": asked.recipe, "seeds": seeds, "steps": recipe.train.steps, "split": figures["split"]}
    yield Result("recurrence", asked.figure, tuple(Row(arm, tuple(found[arm]), more[arm]) for arm in arms), about)


def _lstm(beside: Path, recipe: Recipe, asked: Options) -> dict[str, Any]:
    """The model part of a recipe for as many weights as the Transformer in that folder has."""
    config = read_config(beside)
    assert isinstance(config, ModelConfig)
    made = matching(config, depth=asked.depth)
    return {
        "family": "lstm",
        "width": made.width,
        "depth": made.depth,
        "dropout": made.dropout,
        "context": int(recipe.model.get("context", 64)),
    }


def _seconds(folder: Path) -> float:
    """How long the steps of a run took."""
    return sum(line.get("seconds", 0.0) for line in metrics.read(folder))
