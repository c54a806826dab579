"""Compare the Transformer with an LSTM encoder-decoder with additive attention (Bahdanau et al. 2015).

Both are trained on the same data for the same number of steps, and have about the same number of parameters:
`matching_config` chooses the width of the LSTM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoblock.accounting.lstm_matching import matching_config
from monoblock.accounting.report import account
from monoblock.config.model import ModelConfig
from monoblock.config.schema import check_at_least, check_types
from monoblock.errors import ConfigError
from monoblock.experiments.arms import (
    ArmResult,
    ExperimentResult,
    check_metric,
    load_arm,
    parse_arms,
    parse_seeds,
    train_arm,
    with_seed,
)
from monoblock.interop.folder import read_config
from monoblock.metrics.format import format_metric
from monoblock.recipes.schema import Recipe
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.training import metrics_file

ARMS = ("transformer", "lstm")


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "reverse"
    seeds: str | int = "1"
    arms: str = ",".join(ARMS)
    depth: int = 2  # number of LSTM layers
    limit: int | None = None  # evaluate on at most this many test sources
    figure: str = "accuracy"  # the compared metric

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "depth", "limit")


def run(options: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | ExperimentResult]:
    """Train and evaluate both arms; yield progress messages, and the result at the end."""
    recipe = read_recipe(options.recipe, overrides)
    arms, seeds = parse_arms(options.arms, ARMS), parse_seeds(options.seeds)
    if task_of_recipe(recipe).decoding != "beam_search" or recipe.model.get("family") == "lstm":
        raise ConfigError(
            f"recipe={options.recipe} does not train a Transformer on pairs of source and target; "
            "write recipe=reverse or recipe=multi30k"
        )
    values: dict[str, list[float]] = {arm: [] for arm in arms}
    extra: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    for seed in seeds:
        for arm in ARMS if "lstm" in arms else arms:  # the size of the LSTM depends on the trained Transformer
            arm_folder, changes = folder / f"seed-{seed}" / arm, {}
            if arm == "lstm":
                changes = {"model": _lstm_model_section(arm_folder.with_name("transformer"), recipe, options)}
            yield from train_arm(with_seed(recipe, seed, **changes), arm_folder, data)
            if arm not in arms:
                continue
            pipe = load_arm(arm_folder, recipe.train.device)
            request = EvaluationRequest(data=recipe.data.corpus, folder=data, limit=options.limit)
            metrics = evaluate_request(pipe, request).metrics
            check_metric(options.figure, metrics)
            values[arm].append(metrics[options.figure])
            seconds = sum(line.get("seconds", 0.0) for line in metrics_file.read_metrics(arm_folder))
            extra[arm] = {"parameters": account(pipe.model.config).parameters, "seconds": seconds}
            value = format_metric(options.figure, metrics[options.figure], ".2f")
            yield f"{arm}, seed {seed}: {options.figure} {value}"
    about = {"recipe": options.recipe, "seeds": seeds, "steps": recipe.train.steps, "split": metrics["split"]}
    rows = tuple(ArmResult(arm, tuple(values[arm]), extra[arm]) for arm in arms)
    yield ExperimentResult("recurrence", options.figure, rows, about)


def _lstm_model_section(transformer_folder: Path, recipe: Recipe, options: Options) -> dict[str, Any]:
    """Return the recipe section `model` of an LSTM with about as many parameters as the Transformer in a folder."""
    config = read_config(transformer_folder)
    assert isinstance(config, ModelConfig)
    lstm = matching_config(config, depth=options.depth)
    return {
        "family": "lstm",
        "width": lstm.width,
        "depth": lstm.depth,
        "dropout": lstm.dropout,
        "context": int(recipe.model.get("context", 64)),
    }
