"""`monoblock ls`: what there is to work with."""

import os
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json, table
from monoblock.errors import did_you_mean

Row = dict[str, Any]
RUNS = Path("runs")  # where `monoblock train` puts them
SIZED = ("bpe", "wordpiece", "unigram")  # tokenizers that come out as large as they were asked to be


def _recipes() -> list[Row]:
    from monoblock.tasks.recipe import names, read

    return [
        {
            "name": name,
            "objective": recipe.train.objective,
            "corpus": recipe.data.corpus,
            "parameters": _parameters(recipe),
            "steps": recipe.train.steps,
            "about": recipe.about,
        }
        for name, recipe in ((name, read(name)) for name in names())
    ]


def _parameters(recipe: Any) -> int | None:
    """As many as the model will have; None where only the data can tell (letters, words, classes, images)."""
    from monoblock.accounting.report import account
    from monoblock.tasks.recipe import model_config

    if recipe.train.objective in ("classify", "label") or recipe.tokenizer.kind not in SIZED or recipe.tokenizer.folder:
        return None
    return account(model_config(recipe, recipe.tokenizer.vocab)).parameters


def _presets() -> list[Row]:
    from monoblock.presets import PRESETS

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


def _corpora() -> list[Row]:
    from monoblock.data.corpora import CORPORA, how_to_get, place_of

    folder = os.environ.get("MONOBLOCK_DATA")
    rows = []
    for name, source in CORPORA.items():
        place = place_of(name, folder)
        rows.append(
            {
                "name": name,
                "kind": source.kind,
                "what": source.what,
                "licence": source.licence,
                "here": place is not None,
                "place": place,
                "origin": source.origin,
                "get": None if place else how_to_get(name),
            }
        )
    return rows


def _runs() -> list[Row]:
    folders = sorted(RUNS.iterdir()) if RUNS.is_dir() else []
    return [_run(folder) for folder in folders if (folder / "recipe.toml").is_file()]


def _run(folder: Path) -> Row:
    """What a run folder says about itself; what it does not say, or not legibly, is None."""
    from monoblock.errors import MonoblockError
    from monoblock.tasks.recipe import read
    from monoblock.training import metrics

    try:
        recipe = read(str(folder / "recipe.toml"))
    except (MonoblockError, OSError, ValueError):
        recipe = None
    try:
        lines = metrics.read(folder)
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


# What -> (how it is gathered, the columns shown, the verb to try next). --json gives every key.
SECTIONS = {
    "recipes": (_recipes, ("name", "objective", "corpus", "parameters", "about"), "train {name} --dry-run"),
    "presets": (_presets, ("name", "family", "parameters", "source", "unverified"), "account {name}"),
    "corpora": (_corpora, ("name", "kind", "what", "licence", "here"), "ls corpora --json"),
    "runs": (_runs, ("name", "recipe", "steps", "of", "best_val_loss", "finished"), "account {folder}"),
}


def _known(ctx: click.Context, argument: click.Parameter, what: str | None) -> str | None:
    if what is not None and what not in SECTIONS:
        raise click.UsageError(
            f"no list of {what!r}{did_you_mean(what, SECTIONS)}; there is {', '.join(SECTIONS)}", ctx
        )
    return what


@click.command(name="ls", help=f"List what there is to work with: {', '.join(SECTIONS)}; without WHAT, all of it.")
@click.argument("what", required=False, callback=_known)
@as_json
def command(what: str | None, as_json: bool) -> None:
    found = {name: SECTIONS[name][0]() for name in ([what] if what else SECTIONS)}
    if as_json:
        print_json(found)
        return
    for name, rows in found.items():
        _, columns, _ = SECTIONS[name]
        if len(found) > 1:
            click.echo(f"\n{name}")
        table(columns, [[row[column] for column in columns] for row in rows])
    for name, rows in found.items():
        if rows:
            next_verb(SECTIONS[name][2].format(**rows[0]))
