"""`monoblock finetune MODEL DATA [section.key=value …]`: fine-tune a model with a recipe built for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.output import echo, json_option
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
    help="Fine-tune MODEL (a run folder, a Hugging Face folder or a GGUF file) on DATA (a corpus from `monoblock ls "
    "corpora`, a file or a folder).\n\n"
    "The kind of data decides the task. Labelled texts train a classifier, tagged words train a tagger, and pairs "
    "train a translator. Conversations train a chat model, with the loss computed on its replies only. Plain text "
    "trains a causal or a masked language model, whichever MODEL is.\n\n"
    "A recipe is built for MODEL and DATA. Arguments such as train.batch=8 change it; --dry-run prints all its keys.",
)
@click.argument("model")
@click.argument("data", metavar="DATA")
@click.argument("overrides", nargs=-1, metavar="[section.key=value …]")
@click.option(
    "--objective",
    help="The task, a name from `monoblock ls tasks`.  [default: chosen by the data and the model]",
)
@click.option("--epochs", type=float, help="Passes over the data.")
@click.option("--lr", type=float, help="Peak learning rate.")
@click.option("--lora", is_flag=True, help="Train low-rank adapters (LoRA) and freeze all other weights.")
@click.option(
    "--rank", type=click.IntRange(min=1), help=f"With --lora: rank of the adapters.  [default: {DEFAULT_RANK}]"
)
@click.option("--alpha", type=float, help="With --lora: adapters are scaled by alpha / rank.  [default: 16]")
@click.option(
    "--targets",
    help="With --lora: projections that get an adapter, separated by commas, or all.  [default: query,value]",
)
@click.option("--bits", type=click.Choice(["8", "4"]), help="With --lora: quantize the frozen weights to N bits.")
@click.option("--freeze", type=click.IntRange(min=0), help="Freeze the embedding and the first N layers.")
@click.option(
    "--layer-decay",
    type=float,
    help="Learning rate of each layer as a fraction of that of the layer above it, such as 0.9.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.  [default: runs/<data>-<model>]")
@click.option("--data", "folder", type=folder_type, help=FOLDER_HELP)
@click.option("--resume", is_flag=True, help="Resume the run in --out from its newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the recipe as TOML, which `monoblock train` can read, and exit.")
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
        echo(recipe.to_toml(), nl=False)
        return
    from monoblock.parallel.world import SINGLE_PROCESS

    run_folder = out if out is not None else Path("runs") / recipe.name
    run, last, interrupted_code = run_training(
        recipe, run_folder, resolve_data_folder(folder), SINGLE_PROCESS, {"resume": resume, "tensorboard": False}
    )
    if last.interrupted:
        objective_option = ["--objective", objective] if objective else []
        words = ["finetune", model, data, *all_overrides, *objective_option]
        print_resume_command(run_folder, last.step, words, folder)
        ctx.exit(interrupted_code)
    print_result(run, as_json)


def _recipe_overrides(options: dict[str, Any]) -> list[str]:
    """Translate the command-line options into overrides of the recipe: `section.key=value`."""
    lora = options.pop("lora")
    stray = next((name for name in LORA_OPTIONS if options[name] is not None and not lora), None)
    if stray is not None:
        raise ConfigError(f"--{stray} has no effect without --lora; write --lora as well")
    options["rank"] = (options["rank"] or DEFAULT_RANK) if lora else None
    return [f"{RECIPE_KEYS[name]}={value}" for name, value in options.items() if value is not None]
