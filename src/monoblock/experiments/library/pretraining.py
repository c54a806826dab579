"""A task from few samples, without and with span-corruption pretraining.

One encoder-decoder is pretrained on plain text by span corruption (Raffel et al. 2020). For every seed, two models then
learn the task from the same few samples, with the same tokenizer, steps, batches and learning rates; one of them starts
from the pretrained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from monoblock.config.schema import check_fraction
from monoblock.errors import ConfigError
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import Rule
from monoblock.experiments.synthetic_data import toy_path
from monoblock.experiments.training import evaluate_trial, load_run, train_run, training_metrics
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.tasks.masked_lm import CorruptionSection, SpanCorruption

DEFAULT_RECIPE = "vowels"
SMOKE_TEXTS = 20  # to pretrain on
SMOKE_TRAIN = ("train.steps=4", "train.warmup=2", "train.eval_batches=1")


@dataclass(frozen=True, kw_only=True)
class PretrainingOptions(Options):
    recipe: str = DEFAULT_RECIPE  # recipe of the task
    pretraining: str = "spans-kjv"  # recipe of the pretraining, but with the model and the tokenizer of the task
    steps: int = 1_200  # pretraining steps
    rate: float = 0.25  # fraction of corrupted tokens; with T5's 0.15, a short block would have a single span
    samples: int = 1_000  # training samples of the task
    limit: int | None = 300  # evaluate on at most this many test sources

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "rate")


def check(options: PretrainingOptions, overrides: tuple[str, ...]) -> None:
    task = read_recipe(options.recipe, overrides)
    if task_of_recipe(task).decoding != "beam_search" or "folder" in task.model or task.model.get("family") == "lstm":
        raise ConfigError(
            f"recipe={options.recipe} does not train an encoder-decoder Transformer on pairs; write recipe=vowels"
        )
    if not isinstance(task_of_recipe(read_recipe(options.pretraining)), SpanCorruption):
        raise ConfigError(
            f"pretraining={options.pretraining} is not a span-corruption recipe; write pretraining=spans-kjv"
        )


def before(trial: Trial) -> tuple[Job, ...]:
    return (Job("pretraining", pretrain, (trial,)),)


def pretrain(trial: Trial) -> Iterator[str]:
    """Train the model from which the arm "spans" starts, once for all seeds: that of the task, with its tokenizer."""
    base, task = read_recipe(trial.options.pretraining), _task_recipe(trial)
    same = {"device": task.train.device, "compile": task.train.compile, "precision": task.train.precision}
    sizes = {"steps": trial.options.steps, "batch": 2 * task.train.batch}
    sizes |= {"eval_batches": 1 if trial.smoke else 10, "save_every": 0}
    recipe = replace(
        base,
        data=replace(base.data, limit=SMOKE_TEXTS) if trial.smoke else base.data,
        model=task.model,
        tokenizer=task.tokenizer,
        train=replace(base.train, **sizes, **same),  # type: ignore[arg-type]
        task=CorruptionSection(mask_rate=trial.options.rate),
    )
    for message in train_run(recipe, trial.work_folder / "pretrained", trial.data):
        yield f"pretraining: {message}"


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train the task with the weights of the arm, and evaluate it."""
    task, pretrained = _task_recipe(trial), trial.work_folder / "pretrained"
    changes: dict[str, Any]
    if trial.arm.name == "none":  # only the tokenizer of the pretrained model
        changes = {"tokenizer": replace(task.tokenizer, folder=str(pretrained))}
    else:
        dropout = {name: value for name, value in task.model.items() if "dropout" in name}
        changes = {"model": {"folder": str(pretrained), **dropout}}
    data = replace(task.data, limit=trial.options.samples)
    recipe = replace(task, data=data, train=replace(task.train, seed=trial.seed), **changes)
    yield from train_run(recipe, trial.run_folder, trial.data)
    pipe = load_run(trial.run_folder, recipe)
    metrics = evaluate_trial(trial, pipe, recipe, limit=trial.options.limit)
    yield {**training_metrics(trial.run_folder), **metrics}


def _task_recipe(trial: Trial) -> Recipe:
    smoke = [*SMOKE_TRAIN] if trial.smoke else []
    if trial.smoke and trial.options.recipe == DEFAULT_RECIPE:
        smoke += [f"data.corpus={toy_path('pairs', trial.folder)}", "model.context=96"]
    return read_recipe(trial.options.recipe, [*smoke, *trial.overrides])


EXPERIMENT = Experiment(
    name="pretraining",
    claim="a model that has learned to restore corrupted text learns a task from fewer samples",
    source="A, why the Transformer won; B §14",
    arms=(
        Arm("none", "new weights"),
        Arm("spans", "weights pretrained by span corruption on plain text"),
    ),
    measure=measure,
    before=before,
    check=check,
    options=PretrainingOptions,
    toy="pairs",
    smoke_options={"steps": 4, "samples": 40, "limit": 8},
    budget="1,000 samples and the steps of the recipe; 1,200 steps of pretraining come on top for the arm spans",
    data="the task is to restore the vowels of two words of the King James Bible, the text of the pretraining",
    columns=("chrf", "accuracy", "validation_loss", "training_loss"),
    rules=(Rule("pretraining raises chrF by at least one point", "chrf of spans - chrf of none >= 1"),),
    reading="Both arms see the same samples in the same order; the column accuracy counts exact matches.",
)
