"""One matrix for the embedding and the output, or one for each."""

from __future__ import annotations

from monoblock.experiments.frame.experiment import Arm, Experiment
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import train_and_evaluate
from monoblock.experiments.models.budgets import LANGUAGE_MODEL, LANGUAGE_MODEL_BUDGET, TEXT_SMOKE, TEXT_STAND_IN

EXPERIMENT = Experiment(
    name="tying",
    claim="sharing the embedding with the output matrix saves parameters and often improves the model",
    source="B §10; A, parameters",
    arms=(
        Arm(name="tied", about="one matrix for embedding and output", changes=("model.tie=output",)),
        Arm(name="untied", about="a matrix of its own for the output", changes=("model.tie=none",)),
    ),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=LANGUAGE_MODEL,
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    seeds=(1, 2, 3, 4, 5),
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by words, test split",
    columns=("perplexity", "loss", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        Rule(
            statement="tying lowers perplexity by at least 1 %",
            metric="perplexity",
            arm="tied",
            quantity="ratio",
            other="untied",
            at_most=0.99,
        ),
        Rule(
            statement="tying saves at least a quarter of the parameters of this model",
            metric="parameters",
            arm="tied",
            quantity="ratio",
            other="untied",
            at_most=0.75,
            is_exact=True,
        ),
    ),
    reading="With 33,278 words the embedding is most of a small model, so tying saves more here than in a large one.",
)
