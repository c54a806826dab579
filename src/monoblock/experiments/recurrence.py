"""Compare the Transformer with LSTM encoder-decoders with and without attention, by the length of what they reverse.

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
from typing import Any

import torch

from monoblock.accounting.lstm import matching_config
from monoblock.config.model import ModelConfig
from monoblock.config.schema import check_at_least, check_types
from monoblock.errors import ConfigError
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.frame.jobs import Job
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.settings import recipe_changes, toy_path, write_toy_corpus
from monoblock.experiments.frame.training import evaluate_trial, train_and_load
from monoblock.experiments.reversal import (
    accuracy_by_length,
    parse_lengths,
    strings_folder,
    write_strings,
)
from monoblock.recipes.schema import Recipe
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.runs.train import prepare_run
from monoblock.tasks.text_to_text import TextToText

DEFAULT_RECIPE = "reverse"
TRAIN_PAIRS = 100_000
TOY_CONTEXT = 96  # for the pairs of a toy corpus, letter by letter and with a prefix
TIMED_ROWS = 64  # sequences in the pass that is timed


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = DEFAULT_RECIPE  # "reverse": strings of the lengths below; or another recipe that trains on pairs
    lengths: str | int = "5,10,20,40,80"  # of the strings to reverse; training has all lengths up to the last
    pairs: int = TRAIN_PAIRS  # training pairs
    depth: int = 2  # number of LSTM layers
    limit: int | None = None  # evaluate on at most this many test sources

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "depth", "limit", "pairs")

    @property
    def all_lengths(self) -> list[int]:
        return parse_lengths(self.lengths)


def check(options: Options, overrides: tuple[str, ...]) -> None:
    recipe = read_recipe(options.recipe, overrides)
    if task_of_recipe(recipe).decoding != "beam_search" or recipe.model.get("family") == "lstm":
        raise ConfigError(
            f"recipe={options.recipe} does not train a Transformer on pairs of source and target; "
            "write recipe=reverse or recipe=multi30k"
        )
    parse_lengths(options.lengths)


# -- data -------------------------------------------------------------------------------------------------------------


def before(trial: Trial) -> tuple[Job, ...]:
    if trial.options.recipe != DEFAULT_RECIPE:
        return (Job("pairs", _write_toy, (trial.folder,)),) if trial.smoke else ()
    return (Job("pairs", write_strings, (_pairs_folder(trial), trial.options.all_lengths, trial.options.pairs)),)


def _write_toy(folder: Path) -> Iterator[str]:
    write_toy_corpus("pairs", folder)
    yield "pairs: a toy corpus"


def _pairs_folder(trial: Trial) -> Path:
    return strings_folder(trial.folder, trial.options.all_lengths, trial.options.pairs)


# -- trials -----------------------------------------------------------------------------------------------------------


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train the model of an arm; measure its accuracy at each length, and the time of a training pass."""
    recipe = _recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    if trial.options.recipe != DEFAULT_RECIPE:
        yield {**metrics, **evaluate_trial(trial, pipe, recipe, limit=trial.options.limit)}
        return
    times = {str(length): _milliseconds(pipe, length) for length in trial.options.all_lengths}
    exact = accuracy_by_length(pipe, _pairs_folder(trial), trial.options.all_lengths, trial.options.limit)
    mean = sum(exact.values()) / len(exact)
    yield {**metrics, "accuracy": mean, "reversal_accuracy": exact, "pass_milliseconds": times}


def _recipe(trial: Trial) -> Recipe:
    changes = [*_data_changes(trial), *recipe_changes(RECURRENCE, trial)]
    recipe = read_recipe(trial.options.recipe, [*changes, f"train.seed={trial.seed}"])
    if trial.arm.name == "transformer":
        return recipe
    section = _lstm_section(trial, recipe)
    return replace(recipe, model=section)


def _data_changes(trial: Trial) -> list[str]:
    """Return the overrides of the recipe for its corpus: the strings to reverse, or toy pairs for a smoke run."""
    if trial.options.recipe == DEFAULT_RECIPE:
        longest = max(trial.options.all_lengths) + 4
        return [f"data.corpus={_pairs_folder(trial) / 'corpus'}", f"model.context={longest}"]
    if not trial.smoke:
        return []
    has_tasks = isinstance(task_of_recipe(read_recipe(trial.options.recipe)), TextToText)
    one_task = ["text_to_text.tasks=[]"] if has_tasks else []  # further tasks have large corpora of their own
    return [f"data.corpus={toy_path('pairs', trial.folder)}", f"model.context={TOY_CONTEXT}", *one_task]


def _lstm_section(trial: Trial, recipe: Recipe) -> dict[str, Any]:
    """Return the recipe section `model` of an LSTM with about as many parameters as the Transformer of the recipe.

    The Transformer is built for this, since its vocabulary follows from the data, but not trained.
    """
    folder = trial.run_folder.with_name(f"{trial.arm.name}-size")
    config = prepare_run(recipe, folder, data=trial.data).model.config
    shutil.rmtree(folder)
    assert isinstance(config, ModelConfig)
    lstm = matching_config(config, depth=trial.options.depth)
    section = {"family": "lstm", "width": lstm.width, "depth": lstm.depth, "dropout": lstm.dropout}
    return section | {"context": int(recipe.model.get("context", 64)), "attention": trial.arm.values["attention"]}


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


BUDGET = (
    *("train.steps=3000", "train.batch=128", "model.width=128", "model.heads=4", "model.depth=2"),
    *("train.eval_every=500", "train.save_every=0", "generate.scored_rows=0", "train.lr=2e-3", "train.optimizer=adamw"),
    # Gradients of the LSTMs jump now and then; they are clipped for all arms, and no update is left out.
    *("train.warmup=200", "train.compile=no", "train.clip=1.0", "train.spike_threshold=0.0"),
)
SMOKE = (
    *("model.width=16", "model.heads=2", "model.depth=1", "model.hidden=32", "train.steps=3", "train.batch=4"),
    *("train.warmup=1", "train.compile=no", "train.workers=0", "train.eval_every=0", "train.save_every=0"),
    *("train.average_checkpoints=0", "generate.scored_rows=0", "generate.max_new_tokens=8"),
)
RECURRENCE = Experiment(
    name="recurrence",
    claim="a recurrent model must carry a sequence through one vector and forgets long ones; attention reaches every "
    "token in one step",
    source="A, why the Transformer won; B §01; C, what is next; E §8.1",
    arms=(
        Arm(name="transformer", about="an encoder-decoder Transformer"),
        Arm(name="lstm-attention", about="an LSTM encoder-decoder with additive attention", values={"attention": True}),
        Arm(name="lstm", about="an LSTM encoder-decoder without attention", values={"attention": False}),
    ),
    measure=measure,
    before=before,
    changes=BUDGET,
    smoke=SMOKE,
    check=check,
    options=Options,
    smoke_options={"lengths": "2,4", "pairs": 60, "limit": 4},
    budget="3,000 steps of 128 pairs for every arm, and about as many parameters",
    data="100,000 random strings of up to 80 letters and their reversal; tested on 500 strings of each length",
    columns=("accuracy", "bleu", "validation_loss", "training_loss", "parameters", "seconds_training", "tokens"),
    curves={"reversal_accuracy": "length", "pass_milliseconds": "length", "loss_by_step": "step"},
    rules=(
        *(
            Rule(
                f"at {length} letters, the LSTM without attention is 20 points or more behind",
                f"reversal_accuracy of transformer at {length!s} - reversal_accuracy of lstm at {length!s} >= 0.2",
            )
            for length in (5, 10, 20, 40, 80)
        ),
        Rule(
            "the LSTM with attention reverses 40 letters at most 5 points worse than the Transformer",
            "reversal_accuracy of transformer at 40 - reversal_accuracy of lstm-attention at 40 <= 0.05",
        ),
        Rule(
            "a training pass of the LSTM takes at least 5 times as long at 80 letters as at 10",
            "pass_milliseconds of lstm at 80 / pass_milliseconds of lstm at 10 >= 5",
        ),
    ),
    reading="An answer counts if every letter is right. The length at which the LSTM without attention falls behind is "
    "the first one with a confirmed rule. The time is that of a forward and backward pass over 64 strings.",
)
