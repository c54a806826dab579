"""`monoblock compare EXPERIMENT [key=value …]`: train the arms of an experiment; a table, a plot, a JSON file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, print_json, table
from monoblock.cli.train import data_folder
from monoblock.errors import ConfigError, did_you_mean

# Experiment -> (its module, what it shows).
EXPERIMENTS = {
    "backtranslation": (
        "monoblock.experiments.backtranslation",
        "few pairs and many target sentences: beam, sampled, noised, tagged sources",
    ),
    "pretraining": (
        "monoblock.experiments.pretraining",
        "a text-to-text task from few samples, after span corruption and without it",
    ),
    "recurrence": (
        "monoblock.experiments.recurrence",
        "the Transformer beside the LSTM with attention, as many weights each",
    ),
}
LISTED = "\n".join(f"\b\n  {name}: {what}" for name, (_, what) in EXPERIMENTS.items())


@click.command(
    name="compare",
    help=f"Train the arms of EXPERIMENT with the same budget and seeds, and print their table.\n\n{LISTED}\n\n"
    "Words with a dot change the recipe (train.steps=500), others the experiment (seeds=1,2 arms=none,beam).",
)
@click.argument("experiment")
@click.argument("words", nargs=-1, metavar="[key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the arms.  [runs/compare-<experiment>]")
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of corpora.")
@click.option("--jobs", type=click.IntRange(min=1), help="So many arms at once, each in a process of its own.")
@click.option("--smoke", is_flag=True, help="A few steps of everything, where an experiment has that: smoke=true.")
@as_json
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
        raise ConfigError(f"no experiment {experiment!r}{did_you_mean(experiment, EXPERIMENTS)}; there is {known}")
    own, overrides = _sorted(words)
    own |= {"smoke": True} if smoke else {}
    from monoblock.experiments.arms import Result, options

    module = import_module(EXPERIMENTS[experiment][0])
    asked = options(module.Options, own if jobs is None else {**own, "jobs": jobs})
    folder = out if out is not None else Path("runs") / f"compare-{experiment}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for said in module.run(asked, overrides, folder, data_folder(data)):
            if isinstance(said, Result):
                _report(said, folder, as_json)
            else:
                click.echo(said, err=True)
    finally:
        if not any(folder.iterdir()):  # refused before anything was done
            folder.rmdir()


def _sorted(words: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The experiment's own words, and those about the recipe."""
    from monoblock.tasks.recipe import value

    own: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no option; write key=value, as in seeds=1,2,3")
        if "." in key:
            overrides.append(word)
        else:
            own[key] = value(text)
    return own, overrides


def _report(result: Any, folder: Path, as_json: bool) -> None:
    result.save(folder)
    try:
        result.plot(folder / "result.png")
        drawn = f" and {folder / 'result.png'}"
    except ConfigError as problem:  # a picture is not worth the figures
        drawn = f" (no picture: {problem})"
    if as_json:
        print_json(result.to_json())
    else:
        table(*result.table())
    click.echo(f"Saved {folder / 'result.json'}{drawn}", err=True)
