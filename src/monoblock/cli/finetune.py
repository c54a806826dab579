"""`monoblock finetune MODEL DATA [section.key=value …]`: go on from weights; the recipe follows from model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json
from monoblock.cli.train import data_folder, report, say_how_to_go_on, trained
from monoblock.errors import ConfigError

# Option -> the key of the recipe it stands for.
KEYS = {
    "epochs": "train.epochs",
    "lr": "train.lr",
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "targets": "lora.targets",
    "bits": "lora.bits",
    "freeze": "train.freeze",
    "layer_decay": "train.layer_decay",
}
OF_LORA = ("rank", "alpha", "targets", "bits")
RANK = 8


@click.command(
    name="finetune",
    help="Go on from the weights of MODEL (a run, a Hugging Face folder, a GGUF file) on DATA (a corpus, a file, a "
    "folder).  Labelled texts make a classifier, tagged words a tagger, pairs a translator; text is continued or "
    "filled in, and of conversations the answers are learnt.",
)
@click.argument("model")
@click.argument("data", metavar="DATA")
@click.argument("overrides", nargs=-1, metavar="[section.key=value …]")
@click.option("--objective", help="[by the data and the model]")
@click.option("--epochs", type=float, help="Passes over the data.")
@click.option("--lr", type=float, help="The highest rate.")
@click.option("--lora", is_flag=True, help="Train low-rank adapters beside frozen weights.")
@click.option("--rank", type=click.IntRange(min=1), help=f"Of the adapters.  [{RANK}]")
@click.option("--alpha", type=float, help="Their scale times the rank.  [16]")
@click.option("--targets", help="Projections that get one: q,v or query,up … or all.  [query,value]")
@click.option("--bits", type=click.Choice(["8", "4"]), help="Store the frozen weights in so many bits.")
@click.option("--freeze", type=click.IntRange(min=0), help="The embedding and so many first layers stay as they are.")
@click.option("--layer-decay", type=float, help="A layer's rate as a share of that of the layer above it: 0.9.")
@click.option("--out", type=click.Path(path_type=Path), help="The run folder.  [runs/<data>-<model>]")
@click.option("--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Of corpora.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the recipe and stop; `monoblock train` runs it as well.")
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    data: str,
    overrides: tuple[str, ...],
    objective: str | None,
    out: Path | None,
    folder: Path | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    **words: Any,
) -> None:
    from monoblock.tasks.finetuning import recipe_for

    given = [*_keys(words), *overrides]
    recipe = recipe_for(model, data, objective=objective, folder=data_folder(folder), overrides=given)
    if dry_run:
        click.echo(recipe.to_toml(), nl=False)
        return
    from monoblock.training.parallel import ALONE

    place = out if out is not None else Path("runs") / recipe.name
    options = {"resume": resume, "tensorboard": False}
    run, last = trained(recipe, place, data_folder(folder), ALONE, options)
    if last.interrupted:
        asked = ["--objective", objective] if objective else []
        say_how_to_go_on(place, last.step, ["finetune", model, data, *given, *asked], folder)
        ctx.exit(130)
    report(run, as_json)


def _keys(words: dict[str, Any]) -> list[str]:
    """What the options say, as words of a recipe."""
    lora = words.pop("lora")
    stray = next((name for name in OF_LORA if words[name] is not None and not lora), None)
    if stray is not None:
        raise ConfigError(f"--{stray} is for adapters; write --lora as well")
    words["rank"] = (words["rank"] or RANK) if lora else None
    return [f"{KEYS[name]}={value}" for name, value in words.items() if value is not None]
