"""Run a recipe from the command line: progress, interruption, and the report at the end."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monoblock.cli.output import echo, print_json, suggest_next
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


class TrainingResult(NamedTuple):
    run: Run
    last: FinishedEvent
    interrupted_code: int  # the exit code of the command if the run was interrupted: 130 by Ctrl-C, 143 by SIGTERM


def run_training(
    recipe: Recipe,
    folder: Path,
    data: Path | None,
    world: World,
    options: dict[str, bool],
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Train the model of a recipe, and write it to `folder`.

    options: the arguments `resume` and `tensorboard` of `prepare_run`.
    notes: lines to print before the training.
    """
    from monoblock.runs.run_folder import lock_run_folder
    from monoblock.runs.train import prepare_run

    lock = lock_run_folder(folder, create=not options["resume"], is_main=world.is_main)
    with stop_on_interrupt(world.rank, world.size) as stop, lock:
        run = prepare_run(
            recipe,
            folder,
            data=data,
            stop=stop,
            world=world,
            resume=options["resume"],
            tensorboard=options["tensorboard"],
        )
        for note in notes if world.is_main else ():
            echo(f"note: {note}", err=True)
        if world.size == 1 and not options["resume"]:
            _print_findings(run)
        progress = TrainingProgress(run.recipe.train.steps, run.task_data.unit)
        last = train_to_end(run, progress, resume=options["resume"])
        is_terminated = any(world.all_reduce_sum(stop.signal == signal.SIGTERM)) if last.interrupted else False
        return TrainingResult(run, last, 128 + (signal.SIGTERM if is_terminated else signal.SIGINT))


def _print_findings(run: Run) -> None:
    """Run the cheap checks of the doctor on the model before the first step, and print what they find."""
    from monoblock.runs.diagnose import check_before_training

    report = check_before_training(run)
    if report is None:
        return
    for finding in report.findings:
        echo(f"warning: {finding.check}: {finding.reason}; {finding.fix} ({finding.docs})", err=True)
    if not report.findings:
        words = f"the doctor has no findings in {len(report.checks)} checks before the first step"
        echo(f"{words} ({report.seconds:.1f} s)", err=True)


def print_result(run: Run, as_json: bool) -> None:
    """Print the final metrics of a run, and suggest a command that uses the trained model."""
    summary = summarize_run(run)
    if as_json:
        print_json(summary)
    else:
        figures = summary["figures"].items()
        metrics = [f"{name} {format_metric(name, value)}" for name, value in figures if name != "val_tokens"]
        echo(f"Saved {run.folder}" + (f": {', '.join(metrics)}" if metrics else ""))
    suggest_next(_next_command(run))


def _next_command(run: Run) -> str:
    recipe, rows = run.recipe, run.task_data.validation_rows
    arguments = {
        "generate": _first_words(run) or recipe.generate.prompt,
        "translate": getattr(rows[0], "source", "TEXT") if rows else "TEXT",
        "evaluate": recipe.data.corpus,
    }
    verb = run.task.verb
    return f"{verb} {run.folder}" + (f" {shlex.quote(arguments[verb])}" if arguments.get(verb) else "")


def _first_words(run: Run) -> str:
    """Return some words of the validation data, which are in the language of the corpus; "" if there are none."""
    tokenizer, batches = run.task_data.tokenizer, run.task_data.evaluation_batches
    batch = None if batches is None else next(iter(batches()), None)
    if tokenizer is None or batch is None:
        return ""
    ids = next(iter(batch.inputs.values()))[0, :PROMPT_TOKENS].tolist()
    words = tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]).split()
    return " ".join(words[1:4] or words)[:PROMPT_TOKENS]  # the first and the last word may be cut


def summarize_run(run: Run) -> dict[str, Any]:
    """Return the folder, the number of steps and the final metrics, as `--json` prints them."""
    metrics = dict(run.metrics)
    if "val_loss" in metrics and run.task.head in ("language_model", "masked_lm"):
        metrics["val_perplexity"] = math.exp(min(metrics["val_loss"], MAX_EXPONENT))
    return {"folder": str(run.folder), "steps": run.trainer.step, "figures": metrics}


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
