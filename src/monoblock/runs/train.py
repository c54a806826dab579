"""`mb.train`: train a recipe from Python into a run folder."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.recipes.parse import read_toml
from monoblock.recipes.schema import Recipe
from monoblock.runs.custom_parts import Batch, CustomParts
from monoblock.runs.prepare_run import prepare_run
from monoblock.runs.progress import TrainingProgress, train_to_end
from monoblock.runs.recipe import parse_recipe
from monoblock.runs.run import Run
from monoblock.tasks.task import Task
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import TrainingEvent
from monoblock.training.interrupt import stop_on_interrupt
from monoblock.training.run_lock import lock_run_folder

RecipeLike = str | Path | Mapping[str, object] | Recipe
OWN_DATA = "batches"  # data.corpus of a run that trains on the user's batches


def train(
    recipe: RecipeLike,
    overrides: Mapping[str, object] | Sequence[str] | str = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data: str | Path | None = None,
    task: Task | None = None,
    model_class: type[Transformer] = Transformer,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    batches: Iterable[Batch] | None = None,
    validation_batches: Iterable[Batch] | None = None,
    tokenizer: Tokenizer | None = None,
    callbacks: Sequence[Callable[[TrainingEvent], object]] = (),
    progress: bool = True,
) -> Run:
    """Train a recipe into a run folder, and return the run: `run.model`, `run.metrics`, `run.folder`.

        run = mb.train("gpt-tiny", {"train.steps": 200}, out="runs/x")

    Ctrl-C stops the run after the current step and saves a checkpoint; `run.interrupted` is then True. SIGTERM does the
    same, and then ends the process, unless the program has its own handler. The run folder is locked meanwhile.

    recipe: a name from `monoblock ls recipes`, a TOML file, nested dicts, or a Recipe.
    overrides: {"section.key": value}, or a list of "section.key=value", as on the command line.
    out: the run folder; None is runs/ and the name of the recipe. It must be new or empty, unless `resume`.
    resume: continue from the newest checkpoint in `out`, bit for bit.
    data: folder with corpora.
    task: a task that is not in the package; it sets train.objective.
    model_class: a subclass of Transformer, built from the configuration of the recipe.
    optimizer: a function that builds a torch optimizer for the model. The schedule of the recipe sets its learning
        rate; the key "factor" of a parameter group multiplies it.
    batches: train on these instead of a corpus: pairs (inputs, labels), where `inputs` are keyword arguments of the
        model. They are repeated when they end; a resumed run skips those already used.
    validation_batches: pairs as in `batches`, for the validation loss.
    tokenizer: saved with a model that is trained on `batches`.
    callbacks: functions called with each event of the training (monoblock.training.events).
    progress: show a progress bar in a terminal or notebook, plain lines otherwise.
    """
    if batches is None and (validation_batches is not None or tokenizer is not None):
        raise InputError("validation_batches and tokenizer are used only together with batches; give batches too")
    for callback in callbacks:
        if not callable(callback):
            raise InputError(f"callbacks: {callback!r:.60} is not a function; give functions that take an event")
    overrides = [overrides] if isinstance(overrides, str) else overrides
    parts = CustomParts(task, model_class, optimizer, batches, validation_batches, tokenizer)
    parsed = _parse(recipe, overrides, task, own_data=batches is not None)
    folder = Path("runs") / parsed.name if out is None else Path(out)
    with stop_on_interrupt() as stop, lock_run_folder(folder, create=not resume):
        run = prepare_run(
            parsed, folder, parts=parts, data=None if data is None else Path(data), resume=resume, stop=stop
        )
        display = TrainingProgress(run.recipe.train.steps, run.task_data.unit, hidden=not progress)
        run.interrupted = train_to_end(run, display, resume=resume, callbacks=callbacks).interrupted
    run.model.eval()
    if run.interrupted and stop.signal == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    return run


def _parse(
    recipe: RecipeLike, overrides: Mapping[str, object] | Sequence[str], task: Task | None, *, own_data: bool
) -> Recipe:
    if isinstance(recipe, Recipe):
        tables = recipe.to_tables()
    elif isinstance(recipe, Mapping):
        tables = copy.deepcopy(dict(recipe))
    else:
        tables = read_toml(str(recipe))
    if task is not None:
        tables.setdefault("train", {})["objective"] = task.name
    if own_data:
        tables.setdefault("data", {}).setdefault("corpus", OWN_DATA)
    return parse_recipe(tables, overrides, task=task)
