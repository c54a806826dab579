"""Measure how much span-corruption pretraining improves a text-to-text task with few samples.

One encoder-decoder is pretrained on plain text by span corruption (Raffel et al. 2020). For every seed, two models then
learn the task from the same few samples, with the same tokenizer, steps, batches and learning rates; one of them starts
from the pretrained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from monoblock.config.schema import check_at_least, check_fraction, check_types
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
from monoblock.metrics.format import format_metric
from monoblock.recipes.schema import Recipe
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.masked_lm.section import CorruptionSection
from monoblock.tasks.span_corruption.task import SPAN_CORRUPTION

ARMS = ("none", "spans")  # how the initial weights are pretrained: not at all, or by span corruption
SMOKE_OPTIONS = {"steps": 4, "samples": 40, "seeds": "1", "limit": 8}
SMOKE_TRAIN = {"steps": 4, "warmup": 2, "eval_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "vowels"  # recipe of the task
    pretraining: str = "spans-kjv"  # recipe of the pretraining, but with the model and the tokenizer of the task
    steps: int = 1_200  # pretraining steps
    rate: float = 0.25  # fraction of corrupted tokens; with T5's 0.15, a short block would have a single span
    samples: int = 1_000  # training samples of the task
    seeds: str | int = "1,2,3"
    arms: str = ",".join(ARMS)
    limit: int | None = 300  # evaluate on at most this many test sources
    figure: str = "chrf"  # the compared metric
    smoke: bool = False  # run only a few steps

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "steps", "samples", "limit")
        check_fraction(self, "rate")


def run(options: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | ExperimentResult]:
    """Pretrain, then train and evaluate both arms; yield progress messages, and the result at the end."""
    task, arms = read_recipe(options.recipe, overrides), parse_arms(options.arms, ARMS)
    if task_of_recipe(task).decoding != "beam_search" or "folder" in task.model or task.model.get("family") == "lstm":
        raise ConfigError(
            f"recipe={options.recipe} does not train an encoder-decoder Transformer on pairs; write recipe=vowels"
        )
    pretraining = read_recipe(options.pretraining)
    if task_of_recipe(pretraining) is not SPAN_CORRUPTION:
        raise ConfigError(
            f"pretraining={options.pretraining} is not a span-corruption recipe; write pretraining=spans-kjv"
        )
    if options.smoke:
        options = replace(options, **SMOKE_OPTIONS)  # type: ignore[arg-type]
        task = replace(task, train=replace(task.train, **SMOKE_TRAIN))  # type: ignore[arg-type]
    yield from train_arm(_pretraining_recipe(pretraining, task, options), folder / "pretrained", data)
    task = replace(task, data=replace(task.data, limit=options.samples))
    values: dict[str, list[float]] = {arm: [] for arm in arms}
    exact: dict[str, list[float]] = {arm: [] for arm in arms}  # exact matches
    seeds = parse_seeds(options.seeds)
    for seed in seeds:
        for arm in arms:
            arm_folder = folder / f"seed-{seed}" / arm
            recipe = with_seed(task, seed, **_arm_changes(arm, task, folder / "pretrained"))
            yield from train_arm(recipe, arm_folder, data)
            pipe = load_arm(arm_folder, task.train.device)
            metrics = evaluate_request(
                pipe, EvaluationRequest(data=task.data.corpus, folder=data, limit=options.limit)
            ).metrics
            check_metric(options.figure, metrics)
            values[arm].append(metrics[options.figure])
            exact[arm].append(metrics.get("accuracy", 0.0))
            value = format_metric(options.figure, metrics[options.figure], ".2f")
            yield f"{arm}, seed {seed}: {options.figure} {value}"
    about = {
        "recipe": options.recipe,
        "samples": options.samples,
        "steps": task.train.steps,
        "pretraining_steps": options.steps,
        "hidden": options.rate,
        "seeds": seeds,
        "split": metrics["split"],
    }
    rows = [ArmResult(arm, tuple(values[arm]), {"exact": fmean(exact[arm])}) for arm in arms]
    yield ExperimentResult("pretraining", options.figure, tuple(rows), about)


def _pretraining_recipe(base: Recipe, task: Recipe, options: Options) -> Recipe:
    """Return the pretraining recipe with the model and the tokenizer of the task."""
    same = {"device": task.train.device, "compile": task.train.compile, "precision": task.train.precision}
    sizes = {"steps": options.steps, "batch": 2 * task.train.batch}
    sizes |= {"eval_batches": 1 if options.smoke else 10, "save_every": 0}
    train = replace(base.train, **sizes, **same)  # type: ignore[arg-type]
    corruption = CorruptionSection(mask_rate=options.rate)
    return replace(base, model=task.model, tokenizer=task.tokenizer, train=train, task=corruption)


def _arm_changes(arm: str, task: Recipe, pretrained: Path) -> dict[str, Any]:
    """Return the changes of an arm to the recipe.

    The arm "spans" starts from the pretrained model; the arm "none" uses only the tokenizer of that model.
    """
    if arm == "none":
        return {"tokenizer": {"folder": str(pretrained)}}
    dropout = {name: value for name, value in task.model.items() if "dropout" in name}
    return {"model": {"folder": str(pretrained), **dropout}}
