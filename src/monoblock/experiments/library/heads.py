"""1 to 64 attention heads at equal width."""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.budgets import ON_SUBWORDS, TEXT_SMOKE
from monoblock.experiments.experiment import Arm
from monoblock.experiments.rules import read_rules

WIDTH, COUNTS = 256, (1, 2, 4, 8, 16, 32, 64)

EXPERIMENT = replace(
    ON_SUBWORDS,
    name="heads",
    claim="several heads are better than one, 8 or 16 are standard, and beyond that each head becomes too small",
    source="A, multi-head attention; B §05; E §8.3",
    arms=tuple(
        Arm(str(count), f"{count} head{'s' * (count > 1)} of size {WIDTH // count}", (f"model.heads={count}",))
        for count in COUNTS
    ),
    smoke=(*TEXT_SMOKE, "model.width=128"),
    columns=("perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=read_rules("""
        eight heads are at least 1 % better than one
            perplexity of 8 / perplexity of 1 <= 0.99
        sixteen heads are at least 1 % better than one
            perplexity of 16 / perplexity of 1 <= 0.99
        eight heads are at least 1 % better than 64, which have only four features each
            perplexity of 8 / perplexity of 64 <= 0.99
    """),
    reading="All arms have the same number of parameters.",
)
