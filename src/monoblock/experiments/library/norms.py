"""LayerNorm, RMSNorm and BatchNorm on texts of different lengths.

The texts are strings of up to 100 letters, with padding. BatchNorm takes its statistics over all rows and positions of
a batch, padding included. What it computes for a short text therefore depends on the other texts of the batch:
`neighbour_change` is the largest change of a logit of a short text when a long one joins its batch, in training mode,
divided by the deviation of the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, Trial
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import read_rules
from monoblock.experiments.synthetic_data import accuracy_by_length, parse_lengths, strings_folder, write_strings
from monoblock.experiments.training import train_and_load
from monoblock.model import Transformer
from monoblock.runs.recipe import read_recipe

SHORT, LONG = 10, 50  # letters of the text whose logits are compared, and of its neighbour


@dataclass(frozen=True, kw_only=True)
class NormOptions(Options):
    lengths: str | int = "10,50,100"  # of the strings to reverse; training has all lengths up to the last
    pairs: int = 100_000  # training pairs
    limit: int | None = None  # evaluate on at most this many test strings of each length


def before(trial: Trial) -> tuple[Job, ...]:
    lengths, pairs = parse_lengths(trial.options.lengths), trial.options.pairs
    return (Job("pairs", write_strings, (strings_folder(trial.folder, lengths, pairs), lengths, pairs)),)


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train a model that reverses strings; measure its accuracy by length and the effect of a neighbour."""
    lengths = parse_lengths(trial.options.lengths)
    folder = strings_folder(trial.folder, lengths, trial.options.pairs)
    data = (f"data.corpus={folder / 'corpus'}", f"model.context={max(lengths) + 4}")
    recipe = read_recipe("reverse", [*data, *trial.changes, f"train.seed={trial.seed}"])
    pipe, metrics = yield from train_and_load(trial, recipe)
    assert isinstance(pipe.model, Transformer)
    exact = accuracy_by_length(pipe, folder, lengths, trial.options.limit)
    yield {
        **metrics,
        "reversal_accuracy": exact,
        "accuracy": sum(exact.values()) / len(exact),
        "neighbour_change": neighbour_change(pipe.model, trial.seed),
    }


def neighbour_change(model: Transformer, seed: int) -> float:
    """Return how much a logit of a short text changes at most if a long text joins its batch.

    The unit is the standard deviation of the logits.  They are computed in fp64, since other kernels, which other
    shapes may need, round differently.
    """
    model = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(seed)
    vocab = int(model.input.config.vocab)  # type: ignore[union-attr]
    short, long = (torch.randint(3, vocab, (1, n), generator=generator) for n in (SHORT, LONG))
    padded = torch.cat((torch.cat((short, torch.zeros(1, LONG - SHORT, dtype=torch.long)), 1), long))
    valid = torch.ones_like(padded, dtype=torch.bool)
    valid[0, SHORT:] = False
    device = model.device
    model.train()
    with torch.no_grad():
        alone = model(short.to(device), short.to(device))[0]
        padded, valid = padded.to(device), valid.to(device)
        joined = model(padded, padded, source_mask=valid, target_mask=valid)[0, :SHORT]
    return float((joined - alone).abs().max() / alone.std())


EXPERIMENT = Experiment(
    name="norms",
    claim="LayerNorm treats every position on its own, so it works with sequences of different lengths, where "
    "BatchNorm mixes statistics; RMSNorm does as well as LayerNorm",
    source="C, layer normalization and question 5; B §06 and §11; D, layer normalization",
    arms=(
        Arm("layer", "LayerNorm", ("model.norm=layer",)),
        Arm("rms", "RMSNorm", ("model.norm=rms",)),
        Arm("batch", "BatchNorm over rows and positions, padding included", ("model.norm=batch",)),
        Arm("none", "no norm", ("model.norm=none",)),
    ),
    measure=measure,
    before=before,
    recipe="reverse",
    changes=(
        *("train.steps=4000", "train.batch=128", "model.width=128", "model.heads=4", "model.depth=2", "train.lr=2e-3"),
        *("model.dropout=0.0", "train.eval_every=1000", "train.save_every=0", "generate.scored_rows=0"),
        *("train.compile=no", "train.optimizer=adamw", "train.warmup=200"),
    ),
    smoke=(
        *("model.width=16", "model.heads=2", "train.steps=3", "train.batch=4", "train.warmup=1"),
        "train.eval_every=0",
    ),
    options=NormOptions,
    smoke_options={"lengths": "2,4", "pairs": 60, "limit": 4},
    budget="4,000 steps of 128 pairs for every arm",
    data="100,000 random strings of 2 to 100 letters and their reversal; tested on 500 strings of each length",
    columns=(
        *("accuracy", "neighbour_change", "validation_loss", "training_loss", "skipped", "parameters"),
        "seconds_training",
    ),
    curves={"reversal_accuracy": "length", "loss_by_step": "step"},
    rules=read_rules("""
        with LayerNorm, a neighbour in the batch changes every logit by less than 0.1 % of a deviation
            neighbour_change of layer <= 0.001
        with BatchNorm, a neighbour in the batch changes a logit by at least a tenth of a deviation
            neighbour_change of batch >= 0.1
        with BatchNorm, at least 5 points fewer strings of 50 letters are reversed than with LayerNorm
            reversal_accuracy of layer at 50 - reversal_accuracy of batch at 50 >= 0.05
        with RMSNorm, at most 2 points fewer strings of 50 letters are reversed than with LayerNorm
            reversal_accuracy of layer at 50 - reversal_accuracy of rms at 50 <= 0.02
    """),
    reading="`skipped` is the number of updates that the trainer left out because the gradient was suddenly large. An "
    "answer counts if every letter is right. The unit of `neighbour_change` is the standard deviation of "
    "the logits. A batch of training has strings of similar length and padding, and BatchNorm learns with the "
    "statistics of such batches; in evaluation it uses their running averages, which fit lengths in the middle at "
    "best. So it can have a low training loss and fail at every tested length.",
)
