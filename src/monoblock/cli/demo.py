"""`monoblock demo`: train a small GPT on the King James Bible, sample from it, count its parameters, examine it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared import showcase
from monoblock.cli._shared.account_report import print_shares
from monoblock.cli._shared.output import echo, json_option, print_json, suggest_next
from monoblock.errors import ConfigError, FileError

ATTENTION_TEXT = "And God said, Let there be light: and there was light."


def make_numbered_folder(parent: Path, name: str) -> Path:
    """Create and return the folder parent/name-N, where N is the first free number from 1 on."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    folder = parent / f"{name}-{number}"
    folder.mkdir(parents=True)
    return folder


@click.command(
    name="demo",
    help="Train a small GPT on the King James Bible, print a text that it generates, count its parameters, examine it "
    "with the doctor, and draw its attention. With --families, build a toy model of every architecture instead; with "
    "--picture, only draw their attention masks.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Folder in which the new folder demo-1 (demo-2, …) is created.",
)
@click.option(
    "--families", is_flag=True, help="Build and check a toy model of every architecture, and draw masks and positions."
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw which tokens attend to which in each kind of model, to a .png, .svg or .pdf file, and exit.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the training run.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Continue the demo that was interrupted in this folder.",
)
@json_option
def command(out: Path, families: bool, picture: Path | None, seed: int, resume: Path | None, as_json: bool) -> None:
    if picture is not None:
        _draw_overview(picture, as_json)
        return
    if families and resume is not None:
        raise ConfigError("--families trains nothing that --resume could continue; leave one of them out")
    folder = make_numbered_folder(out, "demo") if resume is None else resume
    result = _check_families(folder) if families else _train_demo(folder, seed, resume=resume is not None)
    if as_json:
        print_json(result)
    elif families:
        showcase.print_report(result["families"])
        showcase.print_diagrams()
        for picture in result["pictures"]:
            echo(f"Saved {picture}")
    else:
        _print_report(result)
    suggest_next("account gpt2 --batch 8 --length 1024" if families else f"account {folder}")


def _draw_overview(path: Path, as_json: bool) -> None:
    from monoblock.plots.figure import check_plot_path
    from monoblock.plots.overview import save_overview

    check_plot_path(path)
    save_overview(path)
    if as_json:
        print_json({"picture": str(path)})
    else:
        echo(f"Saved {path}")


def _check_families(folder: Path) -> dict[str, Any]:
    rows = []
    for name in showcase.SHOWCASE_PRESETS:
        echo(f"building {name} …", err=True)
        rows.append(showcase.check_family(name))
    try:
        return {"families": rows, "pictures": showcase.save_pictures(folder)}
    except FileError as problem:  # without matplotlib, only text is shown
        echo(f"no pictures: {problem}", err=True)
        return {"families": rows, "pictures": []}


def _train_demo(folder: Path, seed: int, *, resume: bool) -> dict[str, Any]:
    from monoblock.cli._shared.training_run import print_continuation, run_training
    from monoblock.parallel.world import SINGLE_PROCESS
    from monoblock.recipes.parse import recipe_path
    from monoblock.runs.account import account
    from monoblock.runs.diagnose import diagnose
    from monoblock.runs.recipe import read_recipe

    recipe = read_recipe(recipe_path(folder)) if resume else read_recipe("demo", [f"train.seed={seed}"])
    options = {"resume": resume, "tensorboard": False}
    run, last, interrupted_code = run_training(recipe, folder, None, SINGLE_PROCESS, options)
    if last.interrupted:
        print_continuation(folder, last.step, ["demo", "--resume", str(folder)])
        raise click.exceptions.Exit(interrupted_code)
    model_account = account(run.model)
    report = diagnose(folder)
    return {
        "folder": str(folder),
        "loss": run.metrics["val_loss"],
        "baselines": run.task_data.baseline_losses,
        "sample": run.sample_text(run.model),
        "parameters": model_account.parameters,
        "components": dict(model_account.components),
        "doctor": {**report.to_dict(), "checks": [result.name for result in report.checks]},
        "picture": _draw_attention(folder),
    }


def _draw_attention(folder: Path) -> str | None:
    """Draw which tokens every head attends to; return the path of the picture, None without matplotlib."""
    from monoblock.runs.inspect.picture import save_attention

    try:
        return str(save_attention(folder, ATTENTION_TEXT, folder / "attention.png"))
    except FileError as problem:
        echo(f"no picture: {problem}", err=True)
        return None


def _print_report(result: dict[str, Any]) -> None:
    echo("\nLoss on books that were held out, in nats per token:")
    baselines = result["baselines"]
    losses = {"uniform guess": baselines["uniform"], "token frequencies (unigram)": baselines["unigram"]}
    for name, loss in {**losses, "this model": result["loss"]}.items():
        echo(f"  {name:<38}{loss:.3f}")
    echo(f"\nA sample:\n\n{result['sample'].strip()}\n")
    echo(f"{result['parameters']:,} parameters:")
    print_shares("parameters", result["components"])
    doctor = result["doctor"]
    echo(f"\nThe doctor made {len(doctor['checks'])} checks and has {len(doctor['findings']) or 'no'} findings.")
    for finding in doctor["findings"]:
        echo(f"  {finding['check']}: {finding['reason']}")
    if result["picture"] is not None:
        echo(f'\nWhich tokens each head attends to in "{ATTENTION_TEXT}": {result["picture"]}')
    echo(f"\nSaved {result['folder']}")
