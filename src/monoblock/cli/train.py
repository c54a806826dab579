"""`monoblock train RECIPE [section.key=value …]`: run a recipe, draw what happens, leave a model folder."""

from __future__ import annotations

import math
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json
from monoblock.cli.drawing import Drawing


@contextmanager
def interruptible(rank: int = 0, processes: int = 1) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the run to stop after the step it is in and save; a second one ends it at once.

    Of several processes each may be told twice, by the terminal and by torchrun, who alone is then told at once.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and processes == 1:
            raise KeyboardInterrupt
        if not asked and not rank:
            click.echo("stopping after this step, then saving; press again to stop at once", err=True)
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def data_folder(given: Path | None) -> Path | None:
    """--data, or MONOBLOCK_DATA."""
    named = os.environ.get("MONOBLOCK_DATA")
    return given if given is not None else Path(named) if named else None


def go(run: Any, drawing: Drawing, *, resume: bool) -> Any:
    """Draw a run to its end and return its last event; of several processes only the leader draws."""
    last = None
    if not run.trainer.world.leads:
        for last in run.events(resume=resume):  # noqa: B007 (the last one is asked for)
            pass
        return last
    with drawing:
        for last in run.events(resume=resume):
            drawing.show(last)
    return last


@click.command(name="train", help="Train a model by a recipe: a name from `monoblock ls recipes`, or a TOML file.")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[section.key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="The run folder.  [runs/<recipe>]")
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of corpora.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and stop.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, help="So many processes train as one.  [1]")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard files.")
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    overrides: tuple[str, ...],
    out: Path | None,
    data: Path | None,
    resume: bool,
    dry_run: bool,
    nproc: int,
    tensorboard: bool,
    as_json: bool,
) -> None:
    from monoblock.tasks.recipe import read

    resolved = read(recipe, overrides)
    if dry_run:
        click.echo(resolved.to_toml(), nl=False)
        return
    from monoblock.tasks.folder import check_folder
    from monoblock.training import parallel

    folder = out if out is not None else Path("runs") / resolved.name
    words, options = [recipe, *overrides], {"resume": resume, "tensorboard": tensorboard}
    if nproc > 1:
        check_folder(folder, resume)
        flags = [f"--{name}" for name, given in {**options, "json": as_json}.items() if given]
        flags += ["--out", str(folder), *(["--data", str(data)] if data is not None else [])]
        ctx.exit(parallel.launch(["train", *words, *flags], nproc, resolved.train.device))
    world = parallel.join(os.environ, resolved.train.device)
    with parallel.among(world):
        run, last = trained(resolved, folder, data_folder(data), world, options)
        if world.leads and last.interrupted:
            say_how_to_go_on(folder, last.step, ["train", *words], data, world.size)
        elif world.leads:
            report(run, as_json)
        world.leave()
    if last.interrupted:
        ctx.exit(130)


def trained(recipe: Any, folder: Path, data: Path | None, world: Any, options: dict[str, bool]) -> tuple[Any, Any]:
    """The run and its last event."""
    from monoblock.tasks.run import prepare

    with interruptible(world.rank, world.size) as stop:
        run = prepare(recipe, folder, data=data, stop=stop, world=world, **options)
        return run, go(run, Drawing(run.recipe.train.steps, run.ground.unit), resume=options["resume"])


def report(run: Any, as_json: bool) -> None:
    summary = finished(run)
    if as_json:
        print_json(summary)
    else:
        shown = [f"{name} {value:.4g}" for name, value in summary["figures"].items() if name != "val_tokens"]
        click.echo(f"Saved {run.folder}" + (f": {', '.join(shown)}" if shown else ""))
    speaks = run.recipe.train.objective == "causal"
    prompt = shlex.quote(run.recipe.generate.prompt or "The")
    if run.recipe.train.objective == "chat":
        next_verb(f"chat {run.folder}")
    elif run.recipe.train.objective == "pairs":
        next_verb(f"translate {run.folder} {shlex.quote(run.ground.held[0].source if run.ground.held else 'TEXT')}")
    else:
        measured = f"evaluate {run.folder} {shlex.quote(run.recipe.data.corpus)}"
        next_verb(f"generate {run.folder} {prompt}" if speaks else measured)


def say_how_to_go_on(folder: Path, step: int, words: list[str], data: Path | None = None, processes: int = 1) -> None:
    """The whole command that takes an interrupted run up again."""
    more = ["--data", str(data)] if data is not None else []
    more += ["--nproc", str(processes)] if processes > 1 else []
    line = shlex.join(["monoblock", *words, "--resume", "--out", str(folder), *more])
    click.echo(f"Saved {folder} at step {step}. Go on with: {line}", err=True)


def finished(run: Any) -> dict[str, Any]:
    """What a finished run measured."""
    figures = dict(run.figures)
    if "val_loss" in figures and run.recipe.train.objective not in ("classify", "label"):
        figures["val_perplexity"] = math.exp(min(figures["val_loss"], 50))
    return {"folder": str(run.folder), "steps": run.trainer.step, "figures": figures}
