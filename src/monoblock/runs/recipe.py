"""Read recipes, including the sections of the tasks, and build the model configuration that a recipe describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError
from monoblock.recipes import model_config, parse
from monoblock.recipes.schema import Recipe
from monoblock.tasks.table import TASKS
from monoblock.tasks.task import Task
from monoblock.untrusted_files import reading

Overrides = Iterable[str] | Mapping[str, Any]  # "section.key=value" or {"section.key": value}


def read_recipe(
    name_or_path: str | Path,
    overrides: Overrides = (),
    *,
    task: Task | None = None,
) -> Recipe:
    """Read a recipe of the package by its name, or a TOML file by its path, and apply overrides `section.key=value`.

    task: a task of your own, which the recipe selects by its name in train.objective.
    """
    with reading(name_or_path):
        return parse_recipe(parse.read_toml(str(name_or_path)), overrides, task=task)


def parse_recipe(
    data: dict[str, Any],
    overrides: Overrides = (),
    *,
    task: Task | None = None,
) -> Recipe:
    """Build a recipe from the nested dicts of its sections; the other arguments are those of `read_recipe`."""
    return parse.parse_recipe(data, overrides, tasks=known_tasks(task))


def known_tasks(task: Task | None = None) -> tuple[Task, ...]:
    """Return the tasks of the package and `task`; raise ConfigError if its name is already that of another task."""
    if task is None or task in TASKS:
        return TASKS
    if any(task.name == known.name for known in TASKS):
        raise ConfigError(f"monoblock already has a task with the name {task.name!r}; give your task another name")
    return (*TASKS, task)


def task_of_recipe(recipe: Recipe, task: Task | None = None) -> Task:
    """Return the task that train.objective names: `task` if it has this name, else a task of the package."""
    return next(known for known in known_tasks(task) if known.name == recipe.train.objective)


def build_model_config(
    recipe: Recipe,
    vocab: int | None,
    stored: ModelConfig | RecurrentConfig | None = None,
    *,
    task: Task | None = None,
    **data_sizes: Any,
) -> ModelConfig | RecurrentConfig:
    """Build the configuration of the model that a recipe trains.

    vocab: the size of the tokenizer's vocabulary; None if there is no tokenizer.
    stored: the configuration in model.folder; None reads it from there.
    task: a task of your own, which the recipe selects by its name in train.objective.
    data_sizes: sizes that follow from the data, such as `classes` or `image`.
    """
    return model_config.build_model_config(recipe, task_of_recipe(recipe, task), vocab, stored, **data_sizes)
