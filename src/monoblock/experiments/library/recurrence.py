"""A Transformer, and LSTMs with and without attention, on reversing strings.

All are trained on the same pairs, strings of letters and their reversal, for the same number of steps, and have about
the same number of parameters: `matching_config` chooses the width of the LSTMs. They are tested on strings of each
length. Without attention, the decoder sees the source only through one vector (Cho et al. 2014); with it, the decoder
looks back at every letter (Bahdanau et al. 2015). With recipe=NAME, any other task on pairs is compared, with the
budget of that recipe and without lengths.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from monoblock.accounting.lstm import matching_config
from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import Rule, read_rules
from monoblock.experiments.synthetic_data import (
    accuracy_by_length,
    parse_lengths,
    strings_folder,
    toy_path,
    write_strings,
    write_toy_corpus,
)
from monoblock.experiments.training import evaluate_trial, train_and_load
from monoblock.recipes.schema import Recipe
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.runs.train import prepare_run
from monoblock.tasks.text_to_text import TextToText

DEFAULT_RECIPE = "reverse"
TOY_CONTEXT = 96  # for the pairs of a toy corpus, letter by letter and with a prefix
TIMED_ROWS = 64  # sequences in the pass that is timed


@dataclass(frozen=True, kw_only=True)
class RecurrenceOptions(Options):
    recipe: str = DEFAULT_RECIPE  # "reverse": strings of the lengths below; or another recipe that trains on pairs
    lengths: str | int = "5,10,20,40,80"  # of the strings to reverse; training has all lengths up to the last
    pairs: int = 100_000  # training pairs
    depth: int = 2  # number of LSTM layers
    limit: int | None = None  # evaluate on at most this many test sources


def check(options: RecurrenceOptions, overrides: tuple[str, ...]) -> None:
    recipe = read_recipe(options.recipe, overrides)
    if task_of_recipe(recipe).decoding != "beam_search" or recipe.model.get("family") == "lstm":
        raise ConfigError(
            f"recipe={options.recipe} does not train a Transformer on pairs of source and target; "
            "write recipe=reverse or recipe=multi30k"
        )


def _strings(trial: Trial) -> tuple[Path, list[int], int]:
    """Return the folder of the strings to reverse, their lengths, and the number of pairs."""
    lengths, pairs = parse_lengths(trial.options.lengths), trial.options.pairs
    return strings_folder(trial.folder, lengths, pairs), lengths, pairs


def before(trial: Trial) -> tuple[Job, ...]:
    if trial.options.recipe == DEFAULT_RECIPE:
        return (Job("pairs", write_strings, _strings(trial)),)
    return (Job("pairs", write_toy, (trial.folder,)),) if trial.smoke else ()


def write_toy(folder: Path) -> Iterator[str]:
    write_toy_corpus("pairs", folder)
    yield "pairs: a toy corpus"


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train the model of an arm; measure its accuracy at each length, and the time of a training pass."""
    recipe = build_recipe(trial)
    if trial.arm.name != "transformer":
        recipe = _with_lstm(trial, recipe)
    pipe, metrics = yield from train_and_load(trial, recipe)
    if trial.options.recipe != DEFAULT_RECIPE:
        yield {**metrics, **evaluate_trial(trial, pipe, recipe, limit=trial.options.limit)}
        return
    folder, lengths, _ = _strings(trial)
    times = {str(length): _milliseconds(pipe, length) for length in lengths}
    exact = accuracy_by_length(pipe, folder, lengths, trial.options.limit)
    mean = sum(exact.values()) / len(exact)
    yield {**metrics, "accuracy": mean, "reversal_accuracy": exact, "pass_milliseconds": times}


def build_recipe(trial: Trial) -> Recipe:
    """Return the recipe of the Transformer; its corpus is the strings to reverse, or toy pairs in a smoke run."""
    data = list[str]()
    if trial.options.recipe == DEFAULT_RECIPE:
        folder, lengths, _ = _strings(trial)
        data = [f"data.corpus={folder / 'corpus'}", f"model.context={max(lengths) + 4}"]
    elif trial.smoke:
        data = [f"data.corpus={toy_path('pairs', trial.folder)}", f"model.context={TOY_CONTEXT}"]
        if isinstance(task_of_recipe(read_recipe(trial.options.recipe)), TextToText):
            data.append("text_to_text.tasks=[]")  # further tasks have large corpora of their own
    return read_recipe(trial.options.recipe, [*data, *trial.changes, f"train.seed={trial.seed}"])


def _with_lstm(trial: Trial, recipe: Recipe) -> Recipe:
    """Return the recipe with an LSTM that has about as many parameters as the Transformer of the recipe.

    The Transformer is built for this, since its vocabulary follows from the data, but not trained.
    """
    folder = trial.run_folder.with_name(f"{trial.arm.name}-size")
    config = prepare_run(recipe, folder, data=trial.data).model.config
    shutil.rmtree(folder)
    assert isinstance(config, ModelConfig)
    lstm = matching_config(config, depth=trial.options.depth)
    section = {"family": "lstm", "width": lstm.width, "depth": lstm.depth, "dropout": lstm.dropout}
    section |= {"context": int(recipe.model.get("context", 64)), "attention": trial.arm.values["attention"]}
    return replace(recipe, model=section)


def _milliseconds(pipe: Pipeline, length: int) -> float:
    """Return the time of a forward and backward pass over strings of one length, the best of three."""
    model, device = pipe.model, pipe.model.device
    ids = torch.randint(3, 20, (TIMED_ROWS, length), device=device)
    best = float("inf")
    model.train()
    for _ in range(4):
        start = time.perf_counter()
        model(ids, ids).float().square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    model.eval()
    return 1000 * best


EXPERIMENT = Experiment(
    name="recurrence",
    claim="a recurrent model must carry a sequence through one vector and forgets long ones; attention reaches every "
    "token in one step",
    source="A, why the Transformer won; B §01; C, what is next; E §8.1",
    arms=(
        Arm("transformer", "an encoder-decoder Transformer"),
        Arm("lstm-attention", "an LSTM encoder-decoder with additive attention", values={"attention": True}),
        Arm("lstm", "an LSTM encoder-decoder without attention", values={"attention": False}),
    ),
    measure=measure,
    before=before,
    changes=(
        *("train.steps=3000", "train.batch=128", "model.width=128", "model.heads=4", "model.depth=2"),
        *("train.eval_every=500", "train.save_every=0", "generate.scored_rows=0", "train.lr=2e-3"),
        # Gradients of the LSTMs jump now and then; they are clipped for all arms, and no update is left out.
        *("train.optimizer=adamw", "train.warmup=200", "train.compile=no", "train.clip=1.0"),
        "train.spike_threshold=0.0",
    ),
    smoke=(
        *("model.width=16", "model.heads=2", "model.depth=1", "model.hidden=32", "train.steps=3", "train.batch=4"),
        *("train.warmup=1", "train.compile=no", "train.workers=0", "train.eval_every=0", "train.save_every=0"),
        *("train.average_checkpoints=0", "generate.scored_rows=0", "generate.max_new_tokens=8"),
    ),
    check=check,
    options=RecurrenceOptions,
    smoke_options={"lengths": "2,4", "pairs": 60, "limit": 4},
    budget="3,000 steps of 128 pairs for every arm, and about as many parameters",
    data="100,000 random strings of up to 80 letters and their reversal; tested on 500 strings of each length",
    columns=("accuracy", "bleu", "validation_loss", "training_loss", "parameters", "seconds_training", "tokens"),
    curves={"reversal_accuracy": "length", "pass_milliseconds": "length", "loss_by_step": "step"},
    rules=(
        *(
            Rule(
                f"at {length} letters, the LSTM without attention is 20 points or more behind",
                f"reversal_accuracy of transformer at {length} - reversal_accuracy of lstm at {length} >= 0.2",
            )
            for length in (5, 10, 20, 40, 80)
        ),
        *read_rules("""
            the LSTM with attention reverses 40 letters at most 5 points worse than the Transformer
                reversal_accuracy of transformer at 40 - reversal_accuracy of lstm-attention at 40 <= 0.05
            a training pass of the LSTM takes at least 5 times as long at 80 letters as at 10
                pass_milliseconds of lstm at 80 / pass_milliseconds of lstm at 10 >= 5
        """),
    ),
    reading="An answer counts if every letter is right. The length at which the LSTM without attention falls behind is "
    "the first one with a confirmed rule. The time is that of a forward and backward pass over 64 strings.",
)
