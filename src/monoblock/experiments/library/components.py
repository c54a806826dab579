"""One part of the block removed at a time."""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.budgets import NO_DROPOUT, ON_SUBWORDS, SUBWORD_MODEL
from monoblock.experiments.experiment import Arm
from monoblock.experiments.rules import Rule

# Arm -> (what is removed, the changes).
REMOVED: dict[str, tuple[str, tuple[str, ...]]] = {
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


def _costs(arm: str, words: str, factor: float, added_later: str = "") -> Rule:
    return Rule(
        f"without {words}, perplexity is at least {factor - 1:.0%} higher",
        f"perplexity of {arm} / perplexity of full >= {factor}",
        added_later=added_later,
    )


EXPERIMENT = replace(
    ON_SUBWORDS,
    name="components",
    claim="attention, feed-forward networks, residuals, norms, positions and the scale are each necessary",
    source="A, five ingredients; D, summary; E §8.1.3",
    arms=(
        Arm("full", "nothing is removed"),
        *(Arm(name, f"without {about}", changes) for name, (about, changes) in REMOVED.items()),
    ),
    changes=SUBWORD_MODEL,
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
        _costs("no-positions", "positions", 2.0, "the rule"),
        _costs("no-dropout", "dropout", 1.02, "the rule"),
        _costs("no-clipping", "the clipping of gradients", 1.02, "this arm"),
    ),
    reading="The model is pre-norm with rotary positions. An arm without feed-forward networks has fewer "
    "parameters too. The arm without dropout is here for comparison: with a budget this small it can be better than "
    "the full model.",
)
