"""`monoblock compare EXPERIMENT [key=value …]`: train the arms (variants) of an experiment, and tabulate them."""

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
        "translation from few pairs, without and with synthetic pairs from back-translation",
    ),
    "pretraining": (
        "monoblock.experiments.pretraining",
        "a text-to-text task from few samples, without and with span-corruption pretraining",
    ),
    "recurrence": (
        "monoblock.experiments.recurrence",
        "a Transformer and an LSTM with attention that has about as many parameters",
    ),
}
EXPERIMENT_HELP = "\n".join(f"\b\n  {name}: {about}" for name, (_, about) in EXPERIMENTS.items())


@click.command(
    name="compare",
    help="Train the arms of EXPERIMENT, which are variants of a model, with the same budget and seeds, and compare "
    f"their results in a table. The experiments are:\n\n{EXPERIMENT_HELP}\n\n"
    "An argument whose key has a dot, such as train.steps=500, changes the recipe of all arms. Other arguments, such "
    "as seeds=1,2 or arms=none,beam, are options of the experiment.",
)
@click.argument("experiment")
@click.argument("words", nargs=-1, metavar="[key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.  [default: runs/compare-<experiment>]")
@click.option("--data", type=folder_type, help=FOLDER_HELP)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Only for backtranslation: number of processes that train arms at the same time.  [default: 1]",
)
@click.option("--smoke", is_flag=True, help="Only for pretraining: train for a few steps, to see that it runs.")
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
        raise ConfigError(
            f"there is no experiment {experiment!r}; write one of {known}{did_you_mean(experiment, EXPERIMENTS)}"
        )
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
        if not any(folder.iterdir()):  # nothing was written, because the options are invalid
            folder.rmdir()


def _split_overrides(words: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Split `key=value` arguments into options of the experiment, and overrides of the recipe (keys with a dot)."""
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
