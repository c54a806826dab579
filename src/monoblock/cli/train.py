"""`monoblock train RECIPE [section.key=value …]`: train the model that a recipe describes."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from monoblock.cli.output import echo
from monoblock.cli.training_run import print_result, print_resume_command, run_training
from monoblock.cli.verb import argument, data_folder_option, json_option, option, resolve_data_folder
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train the model that RECIPE describes: a name from `monoblock ls recipes`, or a TOML file.

    Arguments such as train.steps=500 change keys of the recipe; --dry-run prints it with all its keys.
    """

    recipe: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[section.key=value …]")
    out: Path | None = option("Folder to write.  [default: runs/<recipe>]")
    data: Path | None = data_folder_option()
    resume: bool = option("Resume the run in --out from its newest checkpoint.", False)
    dry_run: bool = option("Print the recipe, with the changes applied, and exit.", False)
    nproc: int = option(
        "Number of processes on this machine; train.parallel says how they share the model.", 1, least=1
    )
    nnodes: int = option("Number of machines that run this command, each with --nproc processes.", 1, least=1)
    head: str = option("With --nnodes: one of the machines, and a free port of it.", "", metavar="HOST:PORT")
    max_restarts: int = option(
        "With --nproc: how often a run that fails starts again, from its newest checkpoint.", 0, least=0
    )
    tensorboard: bool = option("Also write the metrics for TensorBoard.", False)
    as_json: bool = json_option()

    def run(self) -> int | None:
        if self.nnodes > 1:  # before torch is imported: without this, it prints the stack if a machine is lost
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from monoblock.runs.recipe import read_recipe, task_of_recipe

        recipe = read_recipe(self.recipe, self.overrides)
        if self.dry_run:
            if "folder" not in recipe.model:  # where weights come from a folder, that is not read here
                from monoblock.runs.build_data import expected_config

                expected_config(recipe, task_of_recipe(recipe), None)  # raises ConfigError
            echo(recipe.to_toml(), nl=False)
            return None
        folder = self.out if self.out is not None else Path("runs") / recipe.name
        if self.nnodes > 1 and ":" not in self.head:
            raise ConfigError(f"--nnodes {self.nnodes} needs --head HOST:PORT, the same on all machines")
        return self._train(recipe, folder) if self.nproc * self.nnodes == 1 else self._launch(recipe, folder)

    def _launch(self, recipe: Recipe, folder: Path) -> int:
        """Run this command again in several processes, and return the exit code."""
        from monoblock.accounting.parallel import pipeline_size, tensor_size
        from monoblock.parallel.launch import launch
        from monoblock.recipes.parse import check_parallel
        from monoblock.runs.run_folder import check_run_folder

        if "LOCAL_RANK" in os.environ:
            raise ConfigError("torchrun has started this process; leave out --nproc and --nnodes")
        world_size = self.nproc * self.nnodes
        check_parallel(recipe, world_size)
        if self.nnodes == 1:  # else another machine may have begun the run
            check_run_folder(folder, self.resume)
        is_debug = bool((click.get_current_context().obj or {}).get("debug"))
        switches = {"resume": self.resume, "tensorboard": self.tensorboard, "json": self.as_json, "debug": is_debug}
        flags = [f"--{name}" for name, is_set in switches.items() if is_set]
        flags += ["--out", str(folder), *(["--data", str(self.data)] if self.data is not None else [])]
        tensor_size(recipe.train.parallel, recipe.parallel.tensor, world_size, self.nproc)  # before they start
        pipeline_size(recipe.train.parallel, recipe.parallel.pipeline, world_size)
        words, device = ["train", self.recipe, *self.overrides, *flags], recipe.train.device
        restarts = self.max_restarts
        return launch(words, self.nproc, device, folder, max_restarts=restarts, machines=self.nnodes, head=self.head)

    def _train(self, recipe: Recipe, folder: Path) -> int | None:
        """Train in this process, alone or as one of those that torchrun has started."""
        from monoblock.parallel.faults import is_restarted, log_output, stop_with_launcher
        from monoblock.parallel.world import defer_worker_errors
        from monoblock.recipes.parse import list_unused_keys
        from monoblock.runs.run_folder import has_run

        resume = self.resume or (is_restarted(os.environ) and has_run(folder))
        stop_with_launcher(os.environ)
        log_file = log_output(folder, ["monoblock", *sys.argv[1:]], os.environ, create=not resume)
        with log_file as log, defer_worker_errors(os.environ, log):
            world = join_processes(recipe)
            notes = [] if resume else _list_unchanged(self.recipe, self.overrides, recipe)
            notes += list_unused_keys(recipe, world.size)
            options = {"resume": resume, "tensorboard": self.tensorboard}
            data = resolve_data_folder(self.data)
            run, last, interrupted_code = run_training(recipe, folder, data, world, options, notes)
            if world.is_main and last.interrupted:
                words = ["train", self.recipe, *self.overrides]
                print_resume_command(folder, last.step, words, self.data, os.environ)
            elif world.is_main:
                print_result(run, self.as_json)
            world.shut_down()
        return interrupted_code if last.interrupted else None


def join_processes(recipe: Recipe) -> World:
    """Join the processes that torchrun has started, arranged as the recipe says."""
    from monoblock.accounting.parallel import pipeline_size, tensor_size
    from monoblock.parallel.world import init_distributed

    section, parallel = recipe.train, recipe.parallel
    sizes = functools.partial(tensor_size, section.parallel, parallel.tensor)
    stages = functools.partial(pipeline_size, section.parallel, parallel.pipeline)
    return init_distributed(os.environ, section.device, sizes, parallel.timeout, stages)


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
