"""`monoblock demo`: train a small GPT on the King James Bible, hear it, measure it, count it; in about two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli import showcase
from monoblock.cli.account import shares
from monoblock.cli.common import as_json, next_verb, print_json
from monoblock.errors import FileError


def fresh_folder(parent: Path, name: str) -> Path:
    """parent/name-1, or the first number that is free."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    folder = parent / f"{name}-{number}"
    folder.mkdir(parents=True)
    return folder


@click.command(
    name="demo", help="Train a small GPT, sample from it, account for it; --families shows the block instead."
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"), help="Where demo-N is made."
)
@click.option("--families", is_flag=True, help="Build every family from the one block, check it, draw it.")
@click.option("--seed", type=int, default=1, show_default=True)
@as_json
def command(out: Path, families: bool, seed: int, as_json: bool) -> None:
    folder = fresh_folder(out, "demo")
    found = _families(folder) if families else _train(folder, seed)
    if as_json:
        print_json(found)
    elif families:
        showcase.report(found["families"])
        showcase.draw()
        for picture in found["pictures"]:
            click.echo(f"Saved {picture}")
    else:
        _report(found)
    next_verb("account gpt2 --batch 8 --length 1024" if families else f"account {folder}")


def _families(folder: Path) -> dict[str, Any]:
    rows = []
    for name in showcase.SHOWN:
        click.echo(f"building {name} …", err=True)
        rows.append(showcase.family_row(name))
    try:
        return {"families": rows, "pictures": showcase.pictures(folder)}
    except FileError as problem:  # without matplotlib there is still the text
        click.echo(f"no pictures: {problem}", err=True)
        return {"families": rows, "pictures": []}


def _train(folder: Path, seed: int) -> dict[str, Any]:
    """The demo recipe from the first step to the last sample."""
    from monoblock.accounting.report import account
    from monoblock.cli.drawing import Drawing
    from monoblock.cli.train import go, interruptible, say_how_to_go_on
    from monoblock.tasks.recipe import read
    from monoblock.tasks.run import prepare

    recipe = read("demo", [f"train.seed={seed}"])
    with interruptible() as stop:
        run = prepare(recipe, folder, stop=stop)
        last = go(run, Drawing(recipe.train.steps), resume=False)
    if last.interrupted:
        say_how_to_go_on(folder, last.step, ["train", "demo", f"train.seed={seed}"])
        raise click.exceptions.Exit(130)
    counted = account(run.model.config)
    return {
        "folder": str(folder),
        "loss": run.figures["val_loss"],
        "baselines": run.ground.baselines,
        "sample": run.sample(run.model),
        "parameters": counted.parameters,
        "components": dict(counted.components),
    }


def _report(found: dict[str, Any]) -> None:
    click.echo("\nLoss on books it has never read, in nats a token:")
    known = found["baselines"]
    losses = {"guessing evenly": known["uniform"], "knowing how often each token occurs": known["unigram"]}
    for name, loss in {**losses, "this model": found["loss"]}.items():
        click.echo(f"  {name:<38}{loss:.3f}")
    click.echo(f"\nA sample:\n\n{found['sample'].strip()}\n")
    click.echo(f"Its {found['parameters']:,} parameters:")
    shares("parameters", found["components"])
    click.echo(f"\nSaved {found['folder']}")
