"""1 to 64 attention heads at the same width: more heads are smaller, and the number of parameters does not change."""

from __future__ import annotations

from monoblock.experiments.frame.experiment import Arm, Experiment
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import train_and_evaluate
from monoblock.experiments.models.budgets import (
    LANGUAGE_MODEL_BUDGET,
    NO_DROPOUT,
    SUBWORD_MODEL,
    TEXT_SMOKE,
    TEXT_STAND_IN,
)

WIDTH, COUNTS = 256, (1, 2, 4, 8, 16, 32, 64)


def _better(arm: str, other: str, factor: float, words: str) -> Rule:
    return Rule(
        statement=words,
        metric="perplexity",
        arm=arm,
        quantity="ratio",
        other=other,
        at_most=factor,
    )


EXPERIMENT = Experiment(
    name="heads",
    claim="several heads are better than one, 8 or 16 are standard, and beyond that each head becomes too small",
    source="A, multi-head attention; B §05; E §8.3",
    arms=tuple(
        Arm(
            name=str(count),
            about=f"{count} {'head' if count == 1 else 'heads'} of size {WIDTH // count}",
            changes=(f"model.heads={count}",),
        )
        for count in COUNTS
    ),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=(*SUBWORD_MODEL, *NO_DROPOUT),
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=(*TEXT_SMOKE, "model.width=128"),
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by 4,096 subwords, test split",
    columns=("perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        _better("8", "1", 0.99, "eight heads are at least 1 % better than one"),
        _better("16", "1", 0.99, "sixteen heads are at least 1 % better than one"),
        _better("8", "64", 0.99, "eight heads are at least 1 % better than 64, which have only four features each"),
    ),
    reading="All arms have the same number of parameters.",
)
