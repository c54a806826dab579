"""Read recipes from TOML and apply command-line overrides.

The command line beats the file, and the file beats the defaults. An unknown key is an error that names the nearest
known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from monoblock.config.schema import FieldError, from_dict
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.recipes.schema import Recipe

RECIPE_FILE = "recipe.toml"  # in the folder of a run
SECTIONS = ("data", "tokenizer", "model", "train", "lora", "generate")
# Keys of [model] that `model.folder=…` on the command line leaves in place.
REGULARIZATION_KEYS = ("dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout", "pooling")


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = resources.files("monoblock.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_recipe(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by its name in the package or from a TOML file, and apply overrides `section.key=value`."""
    data = _read_toml(name_or_path)
    data.setdefault("name", Path(name_or_path).stem)
    return parse_recipe(data, overrides)


def parse_recipe(data: dict[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Build a recipe from the tables of a TOML file and overrides of the form `section.key=value`."""
    for override in sorted(overrides, key=lambda override: not override.startswith("model.folder=")):
        _apply_override(data, override)
    try:
        return from_dict(Recipe, data)
    except FieldError as problem:
        raise (problem.with_path("") if problem.path == Recipe.__name__ else problem) from None


def _read_toml(name_or_path: str) -> dict[str, Any]:
    path, names = Path(name_or_path), list_recipes()
    if name_or_path in names:
        text = (resources.files("monoblock.recipes") / f"{name_or_path}.toml").read_text(encoding="utf-8")
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    elif path.suffix == ".toml" or "/" in name_or_path:
        raise FileError(f"there is no recipe file {name_or_path}")
    else:
        raise ConfigError(
            f"there is no recipe {name_or_path!r}{did_you_mean(name_or_path, names)} (monoblock ls recipes)"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise FileError(f"{name_or_path} is not TOML: {problem}") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    """Set the key of one override in the tables of a recipe."""
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{override!r} is not an override; write section.key=value, as in train.lr=3e-4")
    if section not in SECTIONS:
        raise ConfigError(f"{override!r}: a recipe has no section {section!r}{did_you_mean(section, SECTIONS)}")
    table = data.setdefault(section, {})
    if section == "data" and name.startswith("augment."):  # a table within a section
        table, name = table.setdefault("augment", {}), name.removeprefix("augment.")
    if section == "model" and name == "folder" and name not in table:  # the sizes in the file are another model's
        data[section] = table = {key: value for key, value in table.items() if key in REGULARIZATION_KEYS}
    if (section, name) == ("train", "steps"):
        table.pop("epochs", None)  # those of the file, which would override the steps
    value = parse_value(text)
    is_list = (section, name) == ("lora", "targets") and isinstance(value, str)
    table[name] = value.split(",") if is_list else value


def parse_value(text: str) -> Any:
    """Parse a TOML value; text that is not TOML becomes a string, so that `model.family=gpt` needs no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
