"""Deep and narrow against shallow and wide."""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.budgets import LANGUAGE_MODEL_BUDGET, ON_SUBWORDS, sized_arm
from monoblock.experiments.rules import read_rules

# Depth -> width: 12 · depth · width² is 4.7 to 5.3 million.
DEPTHS = {1: 640, 2: 448, 4: 320, 6: 256, 8: 224, 12: 192, 24: 128}

EXPERIMENT = replace(
    ON_SUBWORDS,
    name="depth-width",
    claim="at a fixed number of parameters, depth is worth more than width, up to a point",
    source="E §8.5.6; A, the block",
    arms=tuple(sized_arm(depth, width) for depth, width in DEPTHS.items()),
    smoke_arms=("1x640", "24x128"),
    budget=f"{LANGUAGE_MODEL_BUDGET}; 4.7 to 5.3 million parameters in the blocks",
    rules=read_rules("""
        six layers have at least 1 % less loss than one wide layer
            loss of 6x256 / loss of 1x640 <= 0.99
        24 narrow layers are not better than six: their loss is at most 0.5 % lower
            loss of 24x128 / loss of 6x256 >= 0.995
    """),
    reading="The embedding is not part of the budget, so the total number of parameters differs by what a wider "
    "embedding has; a deep model takes longer, because its layers come one after the other.",
)
