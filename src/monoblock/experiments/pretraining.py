"""Span corruption compared with nothing: does an encoder-decoder that has read the text need fewer samples of a task?

One model is pre-trained on running text by restoring hidden spans (Raffel et al. 2020).  For every seed two models then
learn a text-to-text task from the same few samples, with the same tokenizer, steps, batches and rates; one of them
begins with the pre-trained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from monoblock.errors import ConfigError
from monoblock.experiments.arms import Result, Row, listed, loaded, numbers, seeded, trained
from monoblock.schema import check, check_at_least, check_fraction
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.recipe import Recipe, read

ARMS = ("none", "spans")  # what a model begins with
SMOKE = {"steps": 4, "samples": 40, "seeds": "1", "limit": 8}
SMOKE_TRAIN = {"steps": 4, "warmup": 2, "eval_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "vowels"  # of the task
    pretraining: str = "spans-kjv"  # its data and training; the model and the tokenizer are the task's
    steps: int = 1_200  # of pre-training
    rate: float = 0.25  # hidden in it: of a block of few letters, T5's 15 % are one span
    samples: int = 1_000  # of the task
    seeds: str | int = "1,2,3"
    arms: str = ",".join(ARMS)
    limit: int | None = 300  # test sources
    figure: str = "chrf"
    smoke: bool = False  # a few steps of everything

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "steps", "samples", "limit")
        check_fraction(self, "rate")


def run(asked: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | Result]:
    """Pre-train, then train and measure both arms; the last thing yielded is the result."""
    task, arms = read(asked.recipe, overrides), listed(asked.arms, ARMS)
    if task.train.objective != "pairs" or "folder" in task.model or task.model.get("family") == "lstm":
        raise ConfigError(f"recipe={asked.recipe} trains no encoder-decoder on pairs; write recipe=vowels")
    before = read(asked.pretraining)
    if before.train.objective != "spans":
        raise ConfigError(f"pretraining={asked.pretraining} hides no spans; write pretraining=spans-kjv")
    if asked.smoke:
        asked = replace(asked, **SMOKE)  # type: ignore[arg-type]
        task = replace(task, train=replace(task.train, **SMOKE_TRAIN))  # type: ignore[arg-type]
    began = _pretraining(before, task, asked)
    yield from trained(began, folder / "pretrained", data)
    task = replace(task, data=replace(task.data, limit=asked.samples))
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    exact: dict[str, list[float]] = {arm: [] for arm in arms}  # right to the letter
    seeds = numbers(asked.seeds)
    for seed in seeds:
        for arm in arms:
            place = folder / f"seed-{seed}" / arm
            yield from trained(seeded(task, seed, **_start(arm, task, folder / "pretrained")), place, data)
            pipe = loaded(place, task.train.device)
            figures = evaluate(pipe, Asked(data=task.data.corpus, folder=data, limit=asked.limit)).figures
            if asked.figure not in figures:
                raise ConfigError(f"figure={asked.figure} is not measured here; there is {', '.join(figures)}")
            found[arm].append(figures[asked.figure])
            exact[arm].append(figures.get("accuracy", 0.0))
            yield f"{arm}, seed {seed}: {asked.figure} {figures[asked.figure]:.2f}"
    about = {
        "recipe": asked.recipe,
        "samples": asked.samples,
        "steps": task.train.steps,
        "pretraining_steps": asked.steps,
        "hidden": asked.rate,
        "seeds": seeds,
        "split": figures["split"],
    }
    rows = [Row(arm, tuple(found[arm]), {"exact": fmean(exact[arm])}) for arm in arms]
    yield Result("pretraining", asked.figure, tuple(rows), about)


def _pretraining(before: Recipe, task: Recipe, asked: Options) -> Recipe:
    """Span corruption of the task's own model, its text cut by the task's kind of tokenizer."""
    same = {"device": task.train.device, "compile": task.train.compile, "precision": task.train.precision}
    sizes = {"steps": asked.steps, "batch": 2 * task.train.batch, "mask_rate": asked.rate}
    sizes |= {"eval_batches": 1 if asked.smoke else 10, "save_every": 0}
    part = replace(before.train, **sizes, **same)  # type: ignore[arg-type]
    return replace(before, model=task.model, tokenizer=task.tokenizer, train=part)


def _start(arm: str, task: Recipe, pretrained: Path) -> dict[str, Any]:
    """What differs between the arms: where the weights come from.  The tokenizer is one for both."""
    if arm == "none":
        return {"tokenizer": {"folder": str(pretrained)}}
    free = {name: value for name, value in task.model.items() if "dropout" in name}
    return {"model": {"folder": str(pretrained), **free}}
