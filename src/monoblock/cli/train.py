"""`monoblock train RECIPE [section.key=value …]`: train the model that a recipe describes."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.output import echo, json_option
from monoblock.cli._shared.training_run import print_result, print_resume_command, run_training
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.recipes.schema import Recipe


@click.command(
    name="train",
    help="Train the model that RECIPE describes: a name from `monoblock ls recipes`, or a TOML file.\n\n"
    "Arguments such as train.steps=500 change keys of the recipe; --dry-run prints it with all its keys.",
)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[section.key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.  [default: runs/<recipe>]")
@click.option("--data", type=folder_type, help=FOLDER_HELP)
@click.option("--resume", is_flag=True, help="Resume the run in --out from its newest checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the recipe, with the changes applied, and exit.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    help="Number of processes on this machine; train.parallel says how they share the model.  [default: 1]",
)
@click.option(
    "--nnodes",
    type=click.IntRange(min=1),
    default=1,
    help="Number of machines that run this command, each with --nproc processes.  [default: 1]",
)
@click.option(
    "--head", metavar="HOST:PORT", default="", help="With --nnodes: one of the machines, and a free port of it."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="With --nproc: how often a run that fails starts again, from its newest checkpoint.  [default: 0]",
)
@click.option("--tensorboard", is_flag=True, help="Also write the metrics for TensorBoard.")
@json_option
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
    nnodes: int,
    head: str,
    max_restarts: int,
    tensorboard: bool,
    as_json: bool,
) -> None:
    if nnodes > 1:  # before torch is imported: without this, it prints the stack if a machine is lost
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from monoblock.runs.recipe import read_recipe

    resolved = read_recipe(recipe, overrides)
    if dry_run:
        _check_model(resolved)
        echo(resolved.to_toml(), nl=False)
        return
    from monoblock.accounting.parallel import pipeline_size, tensor_size
    from monoblock.parallel.faults import is_restarted, log_output, stop_with_launcher
    from monoblock.parallel.launch import launch
    from monoblock.parallel.world import defer_worker_errors
    from monoblock.recipes.parallel_checks import check_parallel, list_unused_keys
    from monoblock.runs.run_folder import check_run_folder, has_run

    folder = out if out is not None else Path("runs") / resolved.name
    words, options = [recipe, *overrides], {"resume": resume, "tensorboard": tensorboard}
    if nnodes > 1 and ":" not in head:
        raise ConfigError(f"--nnodes {nnodes} needs --head HOST:PORT, the same on all machines")
    if nproc * nnodes > 1:
        if "LOCAL_RANK" in os.environ:
            raise ConfigError("torchrun has started this process; leave out --nproc and --nnodes")
        check_parallel(resolved, nproc * nnodes)
        if nnodes == 1:  # else another machine may have begun the run
            check_run_folder(folder, resume)
        switches = {**options, "json": as_json, "debug": bool(ctx.obj and ctx.obj["debug"])}
        flags = [f"--{name}" for name, is_set in switches.items() if is_set]
        flags += ["--out", str(folder), *(["--data", str(data)] if data is not None else [])]
        tensor_size(resolved.train.parallel, resolved.parallel.tensor, nproc * nnodes, nproc)  # before they start
        pipeline_size(resolved.train.parallel, resolved.parallel.pipeline, nproc * nnodes)
        command_line, device = ["train", *words, *flags], resolved.train.device
        ctx.exit(launch(command_line, nproc, device, folder, max_restarts=max_restarts, machines=nnodes, head=head))
    options["resume"] = resume = resume or (is_restarted(os.environ) and has_run(folder))
    stop_with_launcher(os.environ)
    command_line = ["monoblock", *sys.argv[1:]]
    log_file = log_output(folder, command_line, os.environ, create=not resume)
    with log_file as log, defer_worker_errors(os.environ, log):
        world = join_processes(resolved)
        notes = [] if resume else _list_unchanged(recipe, overrides, resolved)
        notes += list_unused_keys(resolved, world.size)
        run, last, interrupted_code = run_training(resolved, folder, resolve_data_folder(data), world, options, notes)
        if world.is_main and last.interrupted:
            print_resume_command(folder, last.step, ["train", *words], data, os.environ)
        elif world.is_main:
            print_result(run, as_json)
        world.shut_down()
    if last.interrupted:
        ctx.exit(interrupted_code)


def join_processes(recipe: Recipe) -> World:
    """Join the processes that torchrun has started, arranged as the recipe says."""
    from monoblock.accounting.parallel import pipeline_size, tensor_size
    from monoblock.parallel.world import init_distributed

    section, parallel = recipe.train, recipe.parallel
    sizes = functools.partial(tensor_size, section.parallel, parallel.tensor)
    stages = functools.partial(pipeline_size, section.parallel, parallel.pipeline)
    return init_distributed(os.environ, section.device, sizes, parallel.timeout, stages)


def _check_model(recipe: Recipe) -> None:
    """Raise ConfigError if the model of a recipe cannot be built; a model that starts from a folder is not read."""
    from monoblock.runs.build_data import draft_config
    from monoblock.runs.recipe import task_of_recipe

    if "folder" not in recipe.model:
        draft_config(recipe, task_of_recipe(recipe), None)


def _list_unchanged(recipe: str, overrides: tuple[str, ...], resolved: Recipe) -> list[str]:
    """Return a note for each override that is what the recipe says already."""
    from monoblock.runs.recipe import read_recipe

    notes = []
    for index, word in enumerate(overrides):
        try:
            without = read_recipe(recipe, overrides[:index] + overrides[index + 1 :])
        except ConfigError:  # the other overrides need this one
            continue
        if without == resolved:
            notes.append(f"{word} changes nothing, because the recipe says so already")
    return notes
