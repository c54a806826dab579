"""One part of the block removed at a time, everything else unchanged."""

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

# Arm -> (what is removed, the changes).
REMOVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("nothing is removed", ()),
    "no-attention": ("attention: a token sees only itself", ("model.window=1",)),
    "no-feedforward": ("the feed-forward networks", ("model.hidden=0",)),
    # Gradients jump without residuals; no update is left out.
    "no-residual": ("the residual connections", ("model.residual=none", "train.spike_threshold=0.0")),
    "no-norm": ("the norms", ("model.norm=none",)),
    "no-positions": ("the positions", ("model.positions=none",)),
    "no-scale": ("the division by the square root of the head size", ("model.scale=1.0",)),
    "one-head": ("several heads: the one head has the whole width", ("model.heads=1",)),
    "no-dropout": ("dropout", NO_DROPOUT),
    "no-warmup": ("the warm-up of the learning rate", ("train.warmup=0",)),
    "no-clipping": (
        "the clipping of gradients, and without leaving out updates with large ones",
        ("train.clip=0.0", "train.spike_threshold=0.0"),
    ),
}


def _costs(arm: str, words: str, factor: float, *, late: str = "") -> Rule:
    return Rule(
        statement=f"without {words}, perplexity is at least {factor - 1:.0%} higher",
        metric="perplexity",
        arm=arm,
        quantity="ratio",
        other="full",
        at_least=factor,
        late=late,
    )


EXPERIMENT = Experiment(
    name="components",
    claim="attention, feed-forward networks, residuals, norms, positions and the scale are each necessary",
    source="A, five ingredients; D, summary; E §8.1.3",
    arms=tuple(
        Arm(name=name, about=about if name == "full" else f"without {about}", changes=changes)
        for name, (about, changes) in REMOVED.items()
    ),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=SUBWORD_MODEL,
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by 4,096 subwords, test split",
    logarithmic=True,
    columns=("perplexity", "validation_loss", "training_loss", "skipped", "parameters", "seconds_training"),
    rules=(
        _costs("no-attention", "attention", 1.2),
        _costs("no-feedforward", "feed-forward networks", 1.02),
        _costs("no-residual", "residual connections", 1.05),
        _costs("no-norm", "norms", 1.02),
        _costs("no-positions", "positions", 1.02),
        _costs("no-scale", "the scale", 1.02),
        _costs("one-head", "several heads", 1.02),
        _costs("no-warmup", "warm-up", 1.02),
        _costs("no-positions", "positions", 2.0, late="the rule"),
        _costs("no-dropout", "dropout", 1.02, late="the rule"),
        _costs("no-clipping", "the clipping of gradients", 1.02, late="this arm"),
    ),
    reading="The model is pre-norm with rotary positions. An arm without feed-forward networks has fewer "
    "parameters too. The arm without dropout is here for comparison: with a budget this small it can be better than "
    "the full model.",
)
