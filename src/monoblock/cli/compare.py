"""`monoblock compare EXPERIMENT [key=value …]`: train the arms of an experiment and compare them in a table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.output import json_option, print_json, print_table
from monoblock.errors import ConfigError, did_you_mean

# Experiment -> (module, description).
EXPERIMENTS = {
    "backtranslation": (
        "monoblock.experiments.backtranslation",
        "few pairs plus synthetic sources from beam search, sampling, noise and tags",
    ),
    "pretraining": (
        "monoblock.experiments.pretraining",
        "a text-to-text task from few samples, with and without span-corruption pretraining",
    ),
    "recurrence": (
        "monoblock.experiments.recurrence",
        "the Transformer and an LSTM with attention, with equal numbers of parameters",
    ),
}
EXPERIMENT_HELP = "\n".join(f"\b\n  {name}: {about}" for name, (_, about) in EXPERIMENTS.items())


@click.command(
    name="compare",
    help=f"Train the arms of EXPERIMENT with the same budget and seeds, and compare them.\n\n{EXPERIMENT_HELP}\n\n"
    "Keys with a dot change the recipe (train.steps=500), other keys the experiment (seeds=1,2 arms=none,beam).",
)
@click.argument("experiment")
@click.argument("words", nargs=-1, metavar="[key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the arms.  [runs/compare-<experiment>]")
@click.option("--data", type=folder_type, help=FOLDER_HELP)
@click.option("--jobs", type=click.IntRange(min=1), help="Arms trained at once, each in its own process.")
@click.option("--smoke", is_flag=True, help="Run only a few steps, if the experiment supports it (smoke=true).")
@json_option
def command(
    experiment: str,
    words: tuple[str, ...],
    out: Path | None,
    data: Path | None,
    jobs: int | None,
    smoke: bool,
    as_json: bool,
) -> None:
    if experiment not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(f"{experiment!r} is not one of {known}{did_you_mean(experiment, EXPERIMENTS)}")
    values, overrides = _split_overrides(words)
    values |= {"smoke": True} if smoke else {}
    values |= {} if jobs is None else {"jobs": jobs}
    from monoblock.experiments.arms import ExperimentResult, parse_options

    module = import_module(EXPERIMENTS[experiment][0])
    options = parse_options(module.Options, values)
    folder = out if out is not None else Path("runs") / f"compare-{experiment}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for event in module.run(options, overrides, folder, resolve_data_folder(data)):
            if isinstance(event, ExperimentResult):
                _save_and_print(event, folder, as_json)
            else:
                click.echo(event, err=True)
    finally:
        if not any(folder.iterdir()):  # the options were refused
            folder.rmdir()


def _split_overrides(words: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Split `key=value` arguments into options of the experiment and overrides of the recipe."""
    from monoblock.recipes.parse import parse_value

    values: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not an option; write key=value, as in seeds=1,2,3")
        if "." in key:
            overrides.append(word)
        else:
            values[key] = parse_value(text)
    return values, overrides


def _save_and_print(result: Any, folder: Path, as_json: bool) -> None:
    result.save(folder)
    try:
        result.plot(folder / "result.png")
        plot = f" and {folder / 'result.png'}"
    except ConfigError as problem:  # keep the results without a plot
        plot = f" (no plot: {problem})"
    if as_json:
        print_json(result.to_json())
    else:
        print_table(*result.table())
    click.echo(f"Saved {folder / 'result.json'}{plot}", err=True)
