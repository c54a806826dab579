"""`monoblock finetune MODEL DATA [section.key=value …]`: fine-tune a model by a recipe for model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.output import json_option
from monoblock.cli._shared.training_run import print_result, print_resume_command, run_training
from monoblock.errors import ConfigError

# Option -> key of the recipe.
RECIPE_KEYS = {
    "epochs": "train.epochs",
    "lr": "train.lr",
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "targets": "lora.targets",
    "bits": "lora.bits",
    "freeze": "train.freeze_layers",
    "layer_decay": "train.layer_decay",
}
LORA_OPTIONS = ("rank", "alpha", "targets", "bits")
DEFAULT_RANK = 8


@click.command(
    name="finetune",
    help="Fine-tune MODEL (a run, a Hugging Face folder or a GGUF file) on DATA (a corpus, a file or a folder).\n\n"
    "The data decides the task: labelled texts train a classifier, tagged words a tagger, pairs a translator, "
    "conversations a chat model (with the loss on the replies alone), and plain text a language model or a masked one.",
)
@click.argument("model")
@click.argument("data", metavar="DATA")
@click.argument("overrides", nargs=-1, metavar="[section.key=value …]")
@click.option("--objective", help="Training objective.  [depends on the data and the model]")
@click.option("--epochs", type=float, help="Passes over the data.")
@click.option("--lr", type=float, help="Peak learning rate.")
@click.option("--lora", is_flag=True, help="Train low-rank adapters and freeze the weights.")
@click.option("--rank", type=click.IntRange(min=1), help=f"Rank of the adapters.  [{DEFAULT_RANK}]")
@click.option("--alpha", type=float, help="LoRA alpha: adapters are scaled by alpha / rank.  [16]")
@click.option("--targets", help="Projections with an adapter: q,v or query,up … or all.  [query,value]")
@click.option("--bits", type=click.Choice(["8", "4"]), help="Quantize the frozen weights to this many bits.")
@click.option("--freeze", type=click.IntRange(min=0), help="Freeze the embedding and this many layers above it.")
@click.option("--layer-decay", type=float, help="Learning rate of a layer relative to the layer above it, such as 0.9.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [runs/<data>-<model>]")
@click.option("--data", "folder", type=folder_type, help=FOLDER_HELP)
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the recipe, which `monoblock train` can also run, and exit.")
@json_option
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
    **options: Any,
) -> None:
    from monoblock.runs.finetune import build_finetuning_recipe

    all_overrides = [*_recipe_overrides(options), *overrides]
    recipe = build_finetuning_recipe(
        model, data, objective=objective, folder=resolve_data_folder(folder), overrides=all_overrides
    )
    if dry_run:
        click.echo(recipe.to_toml(), nl=False)
        return
    from monoblock.training.distributed import SINGLE_PROCESS

    run_folder = out if out is not None else Path("runs") / recipe.name
    run, last = run_training(
        recipe, run_folder, resolve_data_folder(folder), SINGLE_PROCESS, {"resume": resume, "tensorboard": False}
    )
    if last.interrupted:
        objective_option = ["--objective", objective] if objective else []
        words = ["finetune", model, data, *all_overrides, *objective_option]
        print_resume_command(run_folder, last.step, words, folder)
        ctx.exit(130)
    print_result(run, as_json)


def _recipe_overrides(options: dict[str, Any]) -> list[str]:
    """Translate the command-line options into overrides of the recipe: `section.key=value`."""
    lora = options.pop("lora")
    stray = next((name for name in LORA_OPTIONS if options[name] is not None and not lora), None)
    if stray is not None:
        raise ConfigError(f"--{stray} has no effect without --lora; write --lora as well")
    options["rank"] = (options["rank"] or DEFAULT_RANK) if lora else None
    return [f"{RECIPE_KEYS[name]}={value}" for name, value in options.items() if value is not None]
