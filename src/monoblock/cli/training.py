"""The verbs `train` and `finetune`: run a recipe with progress, stop when interrupted, and report at the end."""

from __future__ import annotations

import functools
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from monoblock.cli.output import echo, print_json, suggest_next
from monoblock.cli.verb import argument, data_folder_option, json_option, option, resolve_data_folder
from monoblock.errors import ConfigError
from monoblock.metrics.table import format_metric
from monoblock.runs.progress import TrainingProgress, train_to_end
from monoblock.training.interrupt import stop_on_interrupt

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.recipes.schema import Recipe
    from monoblock.runs.run import Run
    from monoblock.training.events import FinishedEvent

PROMPT_TOKENS = 32
MAX_EXPONENT = 50.0  # exp of a larger loss, after a diverged run, would overflow
DEFAULT_RANK = 8  # of LoRA
WITH_LORA = {"needs": ("lora",)}
# Option of `finetune` -> key of the recipe.
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
    head: str = option("With --nnodes: host and free port of one machine.", "", metavar="HOST:PORT")
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
        from monoblock.runs.recipe import check_parallel
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
        from monoblock.runs.recipe import list_unused_keys
        from monoblock.runs.run_folder import has_run

        resume = self.resume or (is_restarted(os.environ) and has_run(folder))
        stop_with_launcher(os.environ)
        log_file = log_output(folder, ["monoblock", *sys.argv[1:]], os.environ, create=not resume)
        with log_file as log, defer_worker_errors(os.environ, log):
            world = join_processes(recipe)
            notes = [] if resume else _list_unchanged(self.recipe, self.overrides, recipe)
            notes += list_unused_keys(recipe, world.size)
            data, options = resolve_data_folder(self.data), {"resume": resume, "tensorboard": self.tensorboard}
            run, last, code = run_training(recipe, folder, data, world, **options, notes=notes)
            if world.is_main and last.interrupted:
                words = ["train", self.recipe, *self.overrides]
                print_resume_command(folder, last.step, words, self.data, os.environ)
            elif world.is_main:
                print_result(run, self.as_json)
            world.shut_down()
        return code


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
            notes.append(f"{word} changes nothing: the recipe already has this value")
    return notes


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune MODEL (a run folder, a Hugging Face folder or a GGUF file) on DATA (a corpus from `monoblock ls
    corpora`, a file or a folder).

    The kind of data decides the task. Labelled texts train a classifier, tagged words train a tagger, and pairs train a
    translator. Conversations train a chat model, with the loss computed on its replies only. Plain text trains a causal
    or a masked language model, whichever MODEL is.

    A recipe is built for MODEL and DATA. Arguments such as train.batch=8 change it; --dry-run prints all its keys.
    """

    model: str = argument()
    data: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[section.key=value …]")
    objective: str | None = option(
        "The task, a name from `monoblock ls tasks`.  [default: chosen by the data and the model]"
    )
    epochs: float | None = option("Passes over the data.")
    lr: float | None = option("Peak learning rate.")
    lora: bool = option("Train low-rank adapters (LoRA) and freeze all other weights.", False)
    rank: int | None = option(f"rank of the adapters.  [default: {DEFAULT_RANK}]", least=1, **WITH_LORA)
    alpha: float | None = option("adapters are scaled by alpha / rank.  [default: 16]", **WITH_LORA)
    targets: str | None = option(
        "projections that get an adapter, separated by commas, or all.  [default: query,value]", **WITH_LORA
    )
    bits: Literal["8", "4"] | None = option("quantize the frozen weights to N bits.", **WITH_LORA)
    freeze: int | None = option("Freeze the embedding and the first N layers.", least=0)
    layer_decay: float | None = option(
        "Learning rate of each layer as a fraction of that of the layer above it, such as 0.9."
    )
    out: Path | None = option("Folder to write.  [default: runs/<data>-<model>]")
    folder: Path | None = data_folder_option()
    resume: bool = option("Resume the run in --out from its newest checkpoint.", False)
    dry_run: bool = option("Print the recipe as TOML, which `monoblock train` can read, and exit.", False)
    as_json: bool = json_option()

    def run(self) -> int | None:
        from monoblock.runs.finetune import build_finetuning_recipe

        given = {name: value for name in RECIPE_KEYS if (value := getattr(self, name)) is not None}
        given = {"rank": DEFAULT_RANK} | given if self.lora else given
        overrides = [f"{key}={given[name]}" for name, key in RECIPE_KEYS.items() if name in given]
        overrides += self.overrides
        data = resolve_data_folder(self.folder)
        recipe = build_finetuning_recipe(
            self.model, self.data, objective=self.objective, folder=data, overrides=overrides
        )
        if self.dry_run:
            echo(recipe.to_toml(), nl=False)
            return None
        from monoblock.parallel.world import SINGLE_PROCESS

        folder = self.out if self.out is not None else Path("runs") / recipe.name
        run, last, code = run_training(recipe, folder, data, SINGLE_PROCESS, resume=self.resume)
        if last.interrupted:
            objective = ["--objective", self.objective] if self.objective else []
            words = ["finetune", self.model, self.data, *overrides, *objective]
            print_resume_command(folder, last.step, words, self.folder)
        else:
            print_result(run, self.as_json)
        return code


# -- running a recipe --------------------------------------------------------------------------------------------------


def run_training(
    recipe: Recipe,
    folder: Path,
    data: Path | None,
    world: World,
    *,
    resume: bool,
    tensorboard: bool = False,
    notes: Sequence[str] = (),
) -> tuple[Run, FinishedEvent, int | None]:
    """Train the model of a recipe, and write it to `folder`.

    Return the run, its last event, and the exit code if the run was interrupted: 130 by Ctrl-C, 143 by SIGTERM.

    notes: lines to print before the training.
    """
    from monoblock.runs.run_folder import lock_run_folder
    from monoblock.runs.train import prepare_run

    lock = lock_run_folder(folder, create=not resume, is_main=world.is_main)
    with stop_on_interrupt(world.rank, world.size) as stop, lock:
        options: dict[str, Any] = {"resume": resume, "tensorboard": tensorboard}
        run = prepare_run(recipe, folder, data=data, stop=stop, world=world, **options)
        for note in notes if world.is_main else ():
            echo(f"note: {note}", err=True)
        if world.size == 1 and not resume:
            _print_findings(run)
        last = train_to_end(run, TrainingProgress(run.recipe.train.steps, run.task_data.unit), resume=resume)
        if not last.interrupted:
            return run, last, None
        is_terminated = any(world.all_reduce_sum(stop.signal == signal.SIGTERM))
        return run, last, 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)


def _print_findings(run: Run) -> None:
    """Run the cheap checks of the doctor on the model before the first step, and print what they find."""
    from monoblock.runs.diagnose import check_before_training

    report = check_before_training(run)
    if report is None:
        return
    for finding in report.findings:
        echo(f"warning: {finding.check}: {finding.reason}; {finding.fix} ({finding.docs})", err=True)
    if not report.findings:
        words = f"doctor: {len(report.checks)} checks passed before the first step"
        echo(f"{words} ({report.seconds:.1f} s)", err=True)


def print_result(run: Run, as_json: bool) -> None:
    """Print the final metrics of a run, and suggest a command that uses the trained model."""
    metrics = dict(run.metrics)
    if "val_loss" in metrics and run.task.head in ("language_model", "masked_lm"):
        metrics["val_perplexity"] = math.exp(min(metrics["val_loss"], MAX_EXPONENT))
    if as_json:
        print_json({"folder": str(run.folder), "steps": run.trainer.step, "figures": metrics})
    else:
        figures = [f"{name} {format_metric(name, value)}" for name, value in metrics.items() if name != "val_tokens"]
        echo(f"Saved {run.folder}" + (f": {', '.join(figures)}" if figures else ""))
    recipe, rows = run.recipe, run.task_data.validation_rows
    arguments = {
        "generate": _first_words(run) or recipe.generate.prompt,
        "translate": getattr(rows[0], "source", "TEXT") if rows else "TEXT",
        "evaluate": recipe.data.corpus,
    }
    verb = run.task.verb
    suggest_next(f"{verb} {run.folder}" + (f" {shlex.quote(arguments[verb])}" if arguments.get(verb) else ""))


def _first_words(run: Run) -> str:
    """Return some words of the validation data, which are in the language of the corpus; "" if there are none."""
    tokenizer, batches = run.task_data.tokenizer, run.task_data.evaluation_batches
    batch = None if batches is None else next(iter(batches()), None)
    if tokenizer is None or batch is None:
        return ""
    ids = next(iter(batch.inputs.values()))[0, :PROMPT_TOKENS].tolist()
    words = tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]).split()
    return " ".join(words[1:4] or words)[:PROMPT_TOKENS]  # the first and the last word may be cut


def print_resume_command(
    folder: Path, step: int, words: list[str], data: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Print the command that resumes an interrupted run.

    words: the subcommand and its arguments.
    environment: the environment variables, with which torchrun says how many processes and machines there are.
    """
    options = ["--data", str(data)] if data is not None else []
    processes, machines = ((environment or {}).get(name, "1") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    options += ["--nproc", processes] if processes != "1" else []
    options += ["--nnodes", machines, "--head", "HOST:PORT"] if machines != "1" else []
    print_continuation(folder, step, [*words, "--resume", "--out", str(folder), *options])


def print_continuation(folder: Path, step: int, words: list[str]) -> None:
    """Print that an interrupted run is saved, and the command that continues it."""
    line = shlex.join(["monoblock", *words])
    echo(f"Saved {folder} at step {step}. Resume with: {line}", err=True)
