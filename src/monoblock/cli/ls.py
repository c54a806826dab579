"""`monoblock ls`: list recipes, tasks, keys, presets, knobs, corpora, experiments and runs."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from monoblock.cli.output import echo, print_json, print_table, suggest_next
from monoblock.cli.verb import argument, json_option
from monoblock.config.field_description import REQUIRED, list_choices, type_words
from monoblock.errors import ConfigError, did_you_mean
from monoblock.interop.model_folder import RECIPE_FILE
from monoblock.runs.recipe import recipe_path
from monoblock.untrusted_files import reading

Record = dict[str, Any]
RUNS_FOLDER = Path("runs")
RUN_COLUMNS = ("name", "recipe", "lr", "steps", "of", "best_val_loss", "loss", "finished")  # the last loss in training
NO_DEFAULT = "—"
NARROW_COLUMNS = ("type", "default", "paper")  # on a terminal, these leave room for the meaning


def _list_recipes() -> list[Record]:
    from monoblock.accounting.report import account
    from monoblock.runs.account import config_of_recipe
    from monoblock.runs.recipe import list_recipes, read_recipe

    rows = []
    for name in list_recipes():
        recipe, parameters = read_recipe(name), None
        with suppress(ConfigError):  # the number depends on the data (vocabulary, classes)
            parameters = account(config_of_recipe(name)).parameters
        rows.append(
            {
                "name": name,
                "objective": recipe.train.objective,
                "corpus": recipe.data.corpus,
                "parameters": parameters,
                "steps": recipe.train.steps if recipe.train.epochs is None else None,
                "epochs": recipe.train.epochs,
                "about": recipe.about,
            }
        )
    return rows


def _list_tasks() -> list[Record]:
    from monoblock.tasks.table import TASKS

    return [
        {
            "name": task.name,
            "about": task.about,
            "models": ", ".join(task.families),
            "head": task.head,
            "data": ", ".join(task.corpus_kinds),
            "metrics": ", ".join(task.metrics),
            "keys": [field.name for field in fields(task.section)] if task.section else [],
            "verb": task.verb,
        }
        for task in TASKS
    ]


def _list_keys() -> list[Record]:
    from monoblock.recipes.schema import list_sections
    from monoblock.tasks.table import TASKS

    rows = []
    for section in list_sections(TASKS):
        for key in section.keys:
            name = f"{section.name}.{key.name}" if section.name else key.name
            rows.append(_describe_setting(name, key.hint, key.default, key.meaning) | {"section": section.name})
        if section.name == "model":
            knobs = _list_knobs()
            rows += [{**knob, "name": f"model.{knob['name']}", "section": "model"} for knob in knobs]
    return rows


def _list_knobs() -> list[Record]:
    from monoblock.config.knobs import list_knobs

    return [
        _describe_setting(knob.name, knob.hint, knob.default, knob.meaning) | {"paper": knob.paper}
        for knob in list_knobs()
    ]


def _describe_setting(name: str, hint: Any, default: Any, meaning: str) -> Record:
    """Return a description of a key or knob; without "default" if it has none."""
    words = [*type_words(hint), *map(_show_value, list_choices(hint))]
    row = {"name": name, "type": ", ".join(words), "choices": list_choices(hint), "meaning": meaning}
    return row if default is REQUIRED else row | {"default": default}


def _list_presets() -> list[Record]:
    from monoblock.config.presets import PRESETS

    return [
        {"name": name, "family": preset.config.family}
        | {key: getattr(preset, key) for key in ("parameters", "source", "hub", "unverified")}
        for name, preset in PRESETS.items()
    ]


def _list_corpora() -> list[Record]:
    from monoblock.data.corpora.load import CORPORA, corpus_location, install_hint

    folder = os.environ.get("MONOBLOCK_DATA")
    places = {name: corpus_location(name, folder) for name in CORPORA}
    return [
        {
            "name": name,
            "kind": source.kind,
            "what": source.description,
            "licence": source.licence,
            "here": places[name] is not None,
            "place": places[name],
            "origin": source.origin,
            "get": None if places[name] else install_hint(name),
        }
        for name, source in CORPORA.items()
    ]


def _list_experiments() -> list[Record]:
    from monoblock.experiments.library import EXPERIMENTS

    return [{"name": name, "about": about} for name, about in EXPERIMENTS.items()]


def _list_runs() -> list[Record]:
    """Describe the run folders; what comes from a file that is missing or unreadable is None, and `steps` 0."""
    from monoblock.errors import MonoblockError
    from monoblock.runs.recipe import read_recipe
    from monoblock.training.events import read_metrics

    rows = []
    for folder in sorted(RUNS_FOLDER.iterdir()) if RUNS_FOLDER.is_dir() else []:
        if not os.path.isfile(folder / RECIPE_FILE):
            continue
        recipe, lines = None, []
        with suppress(MonoblockError), reading(folder):
            recipe = read_recipe(recipe_path(folder))
        with suppress(MonoblockError), reading(folder):
            lines = read_metrics(folder)
        validations = [line for line in lines if math.isfinite(line.get("val_loss", math.nan))]
        best = min(validations, key=lambda line: line["val_loss"], default={})
        last: Record = next((line for line in reversed(lines) if "loss" in line), {})
        rows.append(
            {
                "name": folder.name,
                "recipe": recipe.name if recipe else None,
                "lr": recipe.train.lr if recipe else None,
                "steps": max((line["step"] for line in lines), default=0),
                "of": recipe.train.steps if recipe else None,
                "best_val_loss": best.get("val_loss"),
                "best_step": best.get("step"),
                "loss": last.get("loss"),
                "finished": os.path.isfile(folder / "model.safetensors"),
                "folder": str(folder),
            }
        )
    return rows


# Name -> (function that lists it, columns shown, command to suggest). --json prints every key.
LISTINGS = {
    "recipes": (_list_recipes, ("name", "objective", "corpus", "parameters", "about"), "train {name} --dry-run"),
    "tasks": (_list_tasks, ("name", "about", "models", "data", "metrics"), "ls recipes {name}"),
    "keys": (_list_keys, ("name", "type", "default", "meaning"), "train demo train.steps=100 --dry-run"),
    "presets": (_list_presets, ("name", "family", "parameters", "source", "unverified"), "account {name}"),
    "knobs": (_list_knobs, ("name", "type", "default", "meaning", "paper"), "account gpt2 norm=rms kv_heads=4"),
    "corpora": (_list_corpora, ("name", "kind", "what", "licence", "here"), "ls corpora --json"),
    "experiments": (_list_experiments, ("name", "about"), "compare {name} --smoke"),
    "runs": (_list_runs, RUN_COLUMNS, "account {folder}"),
}


def _select_rows(name: str, rows: list[Record], word: str) -> list[Record]:
    """Return the rows that a word selects: a name or section, else a part of a name, else a part of any text."""
    tests: tuple[Callable[[Record], bool], ...] = (
        lambda row: row["name"] == word or row["name"].startswith(f"{word}."),
        lambda row: word in row["name"],
        lambda row: any(word.lower() in value.lower() for value in row.values() if isinstance(value, str)),
    )
    for test in tests:
        if found := [row for row in rows if test(row)]:
            return found
    names = [row["name"] for row in rows]
    names += [name.partition(".")[0] for name in names]
    raise ConfigError(f"none of the {name} matches {word!r}{did_you_mean(word, names)}")


def format_toml(value: Any) -> str:
    """Write a default value as in TOML, which has no None: a key that is none is left out."""
    match value:
        case _ if value is REQUIRED:
            return NO_DEFAULT
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case tuple() | list():
            return f"[{', '.join(format_toml(item) for item in value)}]"
        case _:
            return str(value)


def _show_value(value: Any) -> str:
    """Return a value as a terminal shows it: without quotes, but for an empty string."""
    text = format_toml(value)
    return text.replace('"', "") or '""' if text != '""' else text


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List WHAT, or all of the following if WHAT is not given. With WORD, list only the rows that it selects: a
    name, the section of a key (`ls keys train`), or a part of the text.

    \b
      recipes: descriptions of what `monoblock train` can train
      tasks:   training objectives, with the models and data they need
      keys:    what a recipe, or an override such as train.steps=500, can set
      presets: configurations of published models
      knobs:   what can be changed in a preset or a family of models
      corpora: data sets to train and evaluate on
      experiments: comparisons that `monoblock compare` can run
      runs:    models trained into the folder runs
    """

    what: str | None = argument(None)
    word: str | None = argument(None)
    as_json: bool = json_option()

    def run(self) -> None:
        if self.what is not None and self.what not in LISTINGS:
            known, hint = ", ".join(LISTINGS), did_you_mean(self.what, LISTINGS)
            raise click.UsageError(f"{self.what!r} cannot be listed; write one of {known}{hint}")
        names = [self.what] if self.what else list(LISTINGS)
        listings = {name: LISTINGS[name][0]() for name in names}
        if self.word is not None:
            listings = {name: _select_rows(name, rows, self.word) for name, rows in listings.items()}
        if self.as_json:
            print_json(listings)
            return
        for name, rows in listings.items():
            _, columns, _ = LISTINGS[name]
            if len(listings) > 1:
                echo(f"\n{name}")
            # Keys are split by their section, because the columns of a short section leave more room for the text.
            for group in [list(group) for _, group in groupby(rows, key=lambda row: row.get("section"))] or [[]]:
                shown = [{**row, "default": _show_value(row.get("default", REQUIRED))} for row in group]
                cells = [[row[column] for column in columns] for row in shown]
                print_table(columns, cells, narrow=NARROW_COLUMNS)
        for name, rows in listings.items():
            if rows:
                suggest_next(LISTINGS[name][2].format(**rows[0]))
