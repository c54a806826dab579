"""Deep and narrow against shallow and wide: the same number of parameters in the blocks, 1 to 24 layers."""

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

# Depth -> (width, heads): 12 · depth · width² is 4.7 to 5.3 million, and heads have 32 features.
SHAPES = {1: (640, 20), 2: (448, 14), 4: (320, 10), 6: (256, 8), 8: (224, 7), 12: (192, 6), 24: (128, 4)}


def _arm(depth: int, width: int, heads: int) -> Arm:
    sizes = (f"model.depth={depth}", f"model.width={width}", f"model.heads={heads}", f"model.hidden={4 * width}")
    return Arm(
        name=f"{depth}x{width}", about=f"{depth} {'layer' if depth == 1 else 'layers'} of width {width}", changes=sizes
    )


EXPERIMENT = Experiment(
    name="depth-width",
    claim="at a fixed number of parameters, depth is worth more than width, up to a point",
    source="E §8.5.6; A, the block",
    arms=tuple(_arm(depth, *shape) for depth, shape in SHAPES.items()),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=(*SUBWORD_MODEL, *NO_DROPOUT),
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    smoke_arms=("1x640", "24x128"),
    budget=f"{LANGUAGE_MODEL_BUDGET}; 4.7 to 5.3 million parameters in the blocks",
    data="WikiText-2 by 4,096 subwords, test split",
    columns=("loss", "perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        Rule(
            statement="six layers have at least 1 % less loss than one wide layer",
            metric="loss",
            arm="6x256",
            quantity="ratio",
            other="1x640",
            at_most=0.99,
        ),
        Rule(
            statement="24 narrow layers are not better than six: their loss is at most 0.5 % lower",
            metric="loss",
            arm="24x128",
            quantity="ratio",
            other="6x256",
            at_least=0.995,
        ),
    ),
    reading="The embedding is not part of the budget, so the total number of parameters differs by what a wider "
    "embedding has; a deep model takes longer, because its layers come one after the other.",
)
