"""Train and evaluate a trial with the ordinary recipes: what most experiments measure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from monoblock.experiments.experiment import Metrics, Trial
from monoblock.interop.model_folder import RECIPE_FILE
from monoblock.recipes.schema import Recipe
from monoblock.runs.account import account
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import read_recipe
from monoblock.runs.run_folder import lock_run_folder
from monoblock.runs.train import prepare_run
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.training.events import EvaluationEvent, read_metrics

CARD_FILE = "README.md"  # the last file that a run writes: if it exists, the run is finished
CURVE_POINTS = 20  # of the training loss


def trial_recipe(trial: Trial, more: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a trial: that of the experiment with all changes, its seed, and `more` overrides."""
    return read_recipe(trial.recipe, [*trial.changes, *more, f"train.seed={trial.seed}"])


def train_run(recipe: Recipe, folder: Path, data: Path | None) -> Iterator[str]:
    """Train a recipe into a run folder; yield progress messages.

    A run that the folder already contains is resumed; if it is finished, nothing is done.
    """
    if (folder / CARD_FILE).is_file():
        return
    resume = (folder / RECIPE_FILE).is_file()
    with lock_run_folder(folder):
        run = prepare_run(recipe, folder, data=data, resume=resume)
        for event in run.events(resume=resume):
            if isinstance(event, EvaluationEvent):
                yield f"step {event.step}, validation loss {event.metrics.get('val_loss', 0):.4f}"


def load_run(folder: Path, recipe: Recipe) -> Pipeline:
    device = recipe.train.device
    return load(folder, device=None if device == "auto" else device)


def training_metrics(folder: Path) -> Metrics:
    """Return the last losses, the time and the tokens of a training, and its losses by step as curves."""
    lines = read_metrics(folder)
    steps = [line for line in lines if "loss" in line]
    validations = {str(line["step"]): line["val_loss"] for line in lines if "val_loss" in line and "final" not in line}
    metrics: Metrics = {"seconds_training": sum(line.get("seconds", 0.0) for line in steps)}
    metrics["skipped"] = sum("skipped" in line for line in lines)
    if validations:
        metrics |= {"validation_loss": [*validations.values()][-1], "validation_by_step": validations}
    if not steps:
        return metrics
    last = steps[-1]["step"]
    size = max(1, last // CURVE_POINTS)
    metrics |= {"tokens": steps[-1]["tokens"], "training_loss": _mean_loss(steps[-size:])}
    # Skipped steps have no loss: the points are multiples of `size` all the same, so that curves have common points.
    parts = groupby(steps, key=lambda line: min(-(-line["step"] // size) * size, last))
    metrics["loss_by_step"] = {str(step): _mean_loss(list(part)) for step, part in parts}
    return metrics


def _mean_loss(lines: Sequence[dict[str, Any]]) -> float:
    return sum(line["loss"] for line in lines) / len(lines)


def train_and_load(trial: Trial, recipe: Recipe) -> Generator[str, None, tuple[Pipeline, Metrics]]:
    """Train a recipe in the folder of a trial, yield messages, and return the model and the metrics of the training."""
    yield from train_run(recipe, trial.run_folder, trial.data)
    pipe = load_run(trial.run_folder, recipe)
    return pipe, {"parameters": account(pipe.model).parameters, **training_metrics(trial.run_folder)}


def evaluate_trial(trial: Trial, pipe: Pipeline, recipe: Recipe, **request: Any) -> Metrics:
    """Return the metrics of the task on the test split, if there is one, else on the validation split."""
    corpus = recipe.data.corpus
    return evaluate_request(pipe, EvaluationRequest(data=corpus, folder=trial.data, **request)).metrics


def train_and_evaluate(trial: Trial) -> Iterator[str | Metrics]:
    """Train a trial and evaluate it by its task: the `measure` of most experiments."""
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    limit = 8 if trial.smoke and pipe.model.encoder is not None else None  # a language model has no rows
    yield {**evaluate_trial(trial, pipe, recipe, limit=limit), **metrics}  # `tokens` are those of training
