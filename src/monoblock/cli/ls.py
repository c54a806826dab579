"""`monoblock ls`: list recipes, presets, corpora and runs."""

import os
from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.output import json_option, print_json, print_table, suggest_next
from monoblock.errors import did_you_mean

Record = dict[str, Any]
RUNS_FOLDER = Path("runs")
SIZED_TOKENIZERS = ("bpe", "wordpiece", "unigram")  # the vocabulary size is set in the recipe


def _list_recipes() -> list[Record]:
    from monoblock.recipes.parse import list_recipes
    from monoblock.runs.recipe import read_recipe

    return [
        {
            "name": name,
            "objective": recipe.train.objective,
            "corpus": recipe.data.corpus,
            "parameters": _count_parameters(recipe),
            "steps": recipe.train.steps,
            "about": recipe.about,
        }
        for name, recipe in ((name, read_recipe(name)) for name in list_recipes())
    ]


def _count_parameters(recipe: Any) -> int | None:
    """Return the number of parameters of a recipe's model; None if it depends on the data (vocabulary, classes)."""
    from monoblock.accounting.report import account
    from monoblock.config.parts import HEADS_WITH_CLASSES
    from monoblock.runs.recipe import build_model_config, task_of_recipe

    if (
        task_of_recipe(recipe).head in HEADS_WITH_CLASSES
        or recipe.tokenizer.kind not in SIZED_TOKENIZERS
        or recipe.tokenizer.folder
    ):
        return None
    return account(build_model_config(recipe, recipe.tokenizer.vocab)).parameters


def _list_presets() -> list[Record]:
    from monoblock.config.presets import PRESETS

    return [
        {
            "name": name,
            "family": preset.config.family,
            "parameters": preset.parameters,
            "source": preset.source,
            "hub": preset.hub,
            "unverified": preset.unverified,
        }
        for name, preset in PRESETS.items()
    ]


def _list_corpora() -> list[Record]:
    from monoblock.data.corpora.load import CORPORA, corpus_location, install_hint

    folder = os.environ.get("MONOBLOCK_DATA")
    rows = []
    for name, source in CORPORA.items():
        location = corpus_location(name, folder)
        rows.append(
            {
                "name": name,
                "kind": source.kind,
                "what": source.description,
                "licence": source.licence,
                "here": location is not None,
                "place": location,
                "origin": source.origin,
                "get": None if location else install_hint(name),
            }
        )
    return rows


def _list_runs() -> list[Record]:
    folders = sorted(RUNS_FOLDER.iterdir()) if RUNS_FOLDER.is_dir() else []
    return [_describe_run(folder) for folder in folders if (folder / "recipe.toml").is_file()]


def _describe_run(folder: Path) -> Record:
    """Return a description of a run folder.

    If a file is missing or unreadable, the values that come from it are None, and the number of steps is 0.
    """
    from monoblock.errors import MonoblockError
    from monoblock.runs.recipe import read_recipe
    from monoblock.training import metrics_file

    try:
        recipe = read_recipe(folder / "recipe.toml", warn=False)
    except (MonoblockError, OSError, ValueError):
        recipe = None
    try:
        lines = metrics_file.read(folder)
    except (MonoblockError, OSError, ValueError):
        lines = []
    best = min((line for line in lines if "val_loss" in line), key=lambda line: line["val_loss"], default={})
    return {
        "name": folder.name,
        "recipe": recipe.name if recipe else None,
        "steps": max((line["step"] for line in lines), default=0),
        "of": recipe.train.steps if recipe else None,
        "best_val_loss": best.get("val_loss"),
        "best_step": best.get("step"),
        "finished": (folder / "model.safetensors").is_file(),
        "folder": str(folder),
    }


# Name -> (function that lists it, columns shown, command to suggest). --json prints every key.
LISTINGS = {
    "recipes": (_list_recipes, ("name", "objective", "corpus", "parameters", "about"), "train {name} --dry-run"),
    "presets": (_list_presets, ("name", "family", "parameters", "source", "unverified"), "account {name}"),
    "corpora": (_list_corpora, ("name", "kind", "what", "licence", "here"), "ls corpora --json"),
    "runs": (_list_runs, ("name", "recipe", "steps", "of", "best_val_loss", "finished"), "account {folder}"),
}


def _check_listing(ctx: click.Context, argument: click.Parameter, what: str | None) -> str | None:
    if what is not None and what not in LISTINGS:
        raise click.UsageError(
            f"{what!r} cannot be listed; write one of {', '.join(LISTINGS)}{did_you_mean(what, LISTINGS)}", ctx
        )
    return what


@click.command(
    name="ls",
    help="List WHAT, or all of the following if WHAT is not given:\n\n"
    "\b\n  recipes: descriptions of what `monoblock train` can train"
    "\n  presets: configurations of published models"
    "\n  corpora: data sets to train and evaluate on"
    "\n  runs:    models trained into the folder runs",
)
@click.argument("what", required=False, callback=_check_listing)
@json_option
def command(what: str | None, as_json: bool) -> None:
    listings = {name: LISTINGS[name][0]() for name in ([what] if what else LISTINGS)}
    if as_json:
        print_json(listings)
        return
    for name, rows in listings.items():
        _, columns, _ = LISTINGS[name]
        if len(listings) > 1:
            click.echo(f"\n{name}")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    for name, rows in listings.items():
        if rows:
            suggest_next(LISTINGS[name][2].format(**rows[0]))
