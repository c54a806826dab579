"""Read recipes from TOML and apply command-line overrides.

Overrides take precedence over the file, and the file over the defaults. For an unknown key, the error message suggests
the most similar known key.
"""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from monoblock import untrusted_files
from monoblock.config.schema import FieldError, from_dict
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.recipes.schema import Recipe, TaskKeys

RECIPE_FILE = "recipe.toml"  # in the folder of a run
SECTIONS = ("data", "tokenizer", "model", "train", "lora", "parallel", "generate")
# The keys of [model] that are kept if `model.folder=…` on the command line replaces the model of the file.
REGULARIZATION_KEYS = ("dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout", "pooling")


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = resources.files("monoblock.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def parse_recipe(
    data: dict[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    tasks: Sequence[TaskKeys],
) -> Recipe:
    """Build a recipe from the tables of a TOML file and overrides, `section.key=value` or {"section.key": value}.

    tasks: the known tasks, whose sections a recipe may have.
    """
    sections = (*SECTIONS, *(task.name for task in tasks if task.section is not None))
    data, changes = copy.deepcopy(data), _parse_overrides(overrides, sections)
    for key, value in sorted(changes, key=lambda change: change[0] != "model.folder"):
        _apply_override(data, key, value)
    return _build_recipe(data, _select_task(data, tasks), tasks)


def _select_task(data: Mapping[str, Any], tasks: Sequence[TaskKeys]) -> TaskKeys:
    """Return the task that train.objective names in the tables of a recipe; raise ConfigError if there is none."""
    section = data.get("train")
    name = section.get("objective", "causal_lm") if isinstance(section, Mapping) else "causal_lm"
    found = next((task for task in tasks if name == task.name), None)
    if found is None:
        names = [task.name for task in tasks]
        raise ConfigError(
            f"train.objective={name!r} is not one of {', '.join(names)}{did_you_mean(str(name), names)}; "
            "a task of your own is given in Python, as task=…"
        )
    return found


def _build_recipe(data: dict[str, Any], task: TaskKeys, tasks: Sequence[TaskKeys]) -> Recipe:
    other = next((name for name in data if name != task.name and any(name == item.name for item in tasks)), None)
    if other is not None:
        raise ConfigError(
            f"the section [{other}] is for train.objective={other!r}, but this recipe has train.objective={task.name!r}"
            "; leave out the section, or change the objective"
        )
    own = data.pop(task.name, {})
    try:
        recipe = from_dict(Recipe, data)
        if task.section is None:
            if own:
                raise ConfigError(f"the objective {task.name} has no keys of its own; leave out [{task.name}]")
            _check_supported(recipe, task, tasks)
            return recipe
        section: Any = from_dict(task.section, own, task.name)
    except FieldError as problem:
        raise (problem.with_path("") if problem.path == Recipe.__name__ else problem) from None
    _check_supported(recipe, task, tasks)
    return replace(recipe, task=section)


def _check_supported(recipe: Recipe, task: TaskKeys, tasks: Sequence[TaskKeys]) -> None:
    if recipe.train.adversarial and not task.supports_adversarial:
        names = ", ".join(item.name for item in tasks if item.supports_adversarial)
        raise ConfigError(f"train.adversarial is for {names}, not {task.name}; leave it out")
    if recipe.data.padding != "none":
        return
    if not task.supports_unpadded:
        names = ", ".join(item.name for item in tasks if item.supports_unpadded)
        raise ConfigError(f"data.padding=none is for {names}, not {task.name}; leave it out")
    if recipe.train.adversarial:
        raise ConfigError("train.adversarial needs one text in a row; leave it out, or leave out data.padding=none")
    if recipe.train.compile == "graphs":
        raise ConfigError("train.compile=graphs needs batches of one shape; write auto, or leave out data.padding=none")


def read_toml(name_or_path: str) -> dict[str, Any]:
    """Return the tables of a recipe, which is given by its name in the package or by the path of a TOML file.

    If the recipe has no key `name`, its name is that of the file.
    """
    tables = _load_toml(name_or_path)
    tables.setdefault("name", Path(name_or_path).stem)
    return tables


def recipe_path(folder: str | Path) -> Path:
    """Return the path of the recipe in the folder of a run; raise FileError if it is a link out of the folder."""
    return untrusted_files.safe_join(folder, RECIPE_FILE)


def _load_toml(name_or_path: str) -> dict[str, Any]:
    path, names = Path(name_or_path), list_recipes()
    if name_or_path in names:
        text = (resources.files("monoblock.recipes") / f"{name_or_path}.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)
    if path.is_file():
        return untrusted_files.read_toml(path)
    if os.path.lexists(path) and not path.is_dir():
        raise FileError(f"{name_or_path} is not a regular file; give a recipe file")
    if path.suffix == ".toml" or "/" in name_or_path:
        raise FileError(f"there is no recipe file {name_or_path}; check the path")
    raise ConfigError(
        f"there is no recipe {name_or_path!r}{did_you_mean(name_or_path, names)} (`monoblock ls recipes` lists all)"
    )


def _parse_overrides(overrides: Iterable[str] | Mapping[str, Any], sections: Sequence[str]) -> list[tuple[str, Any]]:
    if not isinstance(overrides, Mapping):
        return [_parse_override(override, sections) for override in overrides]
    for key in overrides:
        _check_key(key, repr(key), sections)
    return list(overrides.items())


def _check_key(key: str, text: str, sections: Sequence[str]) -> None:
    """Raise ConfigError unless a key has the form section.key; `text` is what the user wrote."""
    section, dot, _ = key.partition(".")
    if not dot:
        raise ConfigError(f"{text} is not an override; write section.key=value, as in train.lr=3e-4")
    if section not in sections:
        raise ConfigError(f"{text}: a recipe has no section {section!r}{did_you_mean(section, sections)}")


def _parse_override(override: str, sections: Sequence[str]) -> tuple[str, Any]:
    """Split `section.key=value` into its key and value; raise ConfigError for an unknown section."""
    key, equals, text = override.partition("=")
    _check_key(key if equals else "", repr(override), sections)
    value = parse_value(text)
    is_list = key == "lora.targets" and isinstance(value, str)
    return key, value.split(",") if is_list else value


def _apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a key in the tables of a recipe, and remove the keys that the new value replaces."""
    if key == "model.folder" and "folder" not in data.get("model", {}):  # the file has the sizes of another model
        data["model"] = {name: size for name, size in data.get("model", {}).items() if name in REGULARIZATION_KEYS}
    if key == "train.steps":
        data.get("train", {}).pop("epochs", None)  # epochs in the file would override the steps
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
    data[last] = value


def parse_value(text: str) -> Any:
    """Parse a TOML value; text that is not TOML becomes a string, so that `model.family=gpt` needs no quotes."""
    try:
        return untrusted_files.parse_toml(f"v = {text}", "the value")["v"]
    except FileError:
        return text


# The strategies for which each key of the section [parallel] means something.
KEY_STRATEGIES = {
    "tensor": ("tp", "fsdp+tp"),
    "sequence": ("tp", "fsdp+tp"),
    "reshard_after_forward": ("fsdp", "fsdp+tp"),
    "offload": ("fsdp", "fsdp+tp"),
    "pipeline": ("pp",),
    "microbatches": ("pp",),
    "schedule": ("pp",),
}


def check_parallel(recipe: Recipe, processes: int, *, has_own_loss: bool = False) -> None:
    """Raise ConfigError if a choice of the recipe does not work with weights that are split among processes.

    has_own_loss: whether the loss of the task is another function than the cross-entropy.
    """
    section = recipe.train
    if processes > 1 and recipe.data.packing == "contiguous":
        raise ConfigError(
            "data.packing=contiguous keeps the state of an LSTM in one process; write data.packing=stream, or train in "
            "one process"
        )
    if processes == 1 or section.parallel == "ddp":
        return
    name = f"train.parallel={section.parallel}"
    if recipe.data.padding == "none" and section.parallel != "fsdp":
        raise ConfigError(f"data.padding=none cannot be used with {name}; write train.parallel=fsdp, or leave it out")
    if section.adversarial:
        raise ConfigError(f"train.adversarial cannot be used with {name}; write train.parallel=ddp")
    if recipe.model.get("norm") == "batch":
        raise ConfigError(
            f"model.norm=batch cannot be used with {name}, which does not share running statistics among processes; "
            "write train.parallel=ddp, or model.norm=layer"
        )
    if section.precision in ("fp16", "fp8"):
        raise ConfigError(f"train.precision={section.precision} cannot be used with {name}; write train.precision=bf16")
    if section.parallel == "pp" and has_own_loss:
        raise ConfigError(f"an objective with a loss of its own cannot be used with {name}; write train.parallel=fsdp")
    if recipe.lora.rank:
        raise ConfigError(f"lora.rank cannot be used with {name}; write train.parallel=ddp")


def list_unused_keys(recipe: Recipe, processes: int) -> list[str]:
    """Return a note for each key of [parallel] that differs from its default and changes nothing."""
    section, default = recipe.parallel, type(recipe.parallel)()
    changed = [key for key in KEY_STRATEGIES if getattr(section, key) != getattr(default, key)]
    if processes == 1:
        return [f"parallel.{key} changes nothing in a single process" for key in changed]
    return [
        f"parallel.{key} changes nothing with train.parallel={recipe.train.parallel}"
        for key in changed
        if recipe.train.parallel not in KEY_STRATEGIES[key]
    ]
