"""One matrix for embedding and output, or two."""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.budgets import ON_WORDS
from monoblock.experiments.experiment import Arm
from monoblock.experiments.rules import read_rules

EXPERIMENT = replace(
    ON_WORDS,
    name="tying",
    claim="sharing the embedding with the output matrix saves parameters and often improves the model",
    source="B §10; A, parameters",
    arms=(
        Arm("tied", "one matrix for embedding and output", ("model.tie=output",)),
        Arm("untied", "a matrix of its own for the output", ("model.tie=none",)),
    ),
    seeds=(1, 2, 3, 4, 5),
    columns=("perplexity", "loss", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=read_rules("""
        tying lowers perplexity by at least 1 %
            perplexity of tied / perplexity of untied <= 0.99
        tying saves at least a quarter of the parameters of this model
            parameters of tied / parameters of untied <= 0.75 [exact]
    """),
    reading="With 33,278 words the embedding is most of a small model, so tying saves more here than in a large one.",
)
