"""Label smoothing, by perplexity and by BLEU.

Perplexity is computed without the smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from monoblock.experiments.budgets import TRANSLATION, TRANSLATION_SMOKE, TRANSLATION_STAND_IN
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import train_and_evaluate


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train and evaluate a translation model; its validation loss is that of the right tokens, without smoothing."""
    for event in train_and_evaluate(trial):
        if isinstance(event, dict) and "validation_loss" in event:
            event = {**event, "validation_perplexity": math.exp(event["validation_loss"])}
        yield event


EXPERIMENT = Experiment(
    name="smoothing",
    claim="label smoothing of 0.1 hurts perplexity but improves BLEU",
    source="B §10 for BLEU; Vaswani et al. 2017, §5.4, for perplexity",
    arms=tuple(
        Arm(share, f"{share} of the target probability spread", (f"train.label_smoothing={share}",))
        for share in ("0.0", "0.1", "0.2")
    ),
    measure=measure,
    recipe="multi30k",
    changes=(*TRANSLATION, "train.eval_every=1000"),
    stand_in=TRANSLATION_STAND_IN,
    toy="pairs",
    smoke=(*TRANSLATION_SMOKE, "train.eval_every=3"),
    seeds=(1, 2, 3, 4, 5),
    budget="3,000 steps of 256 pairs for every arm",
    data="Multi30k from German to English: validation split for perplexity, test split of 2016 for BLEU",
    columns=("bleu_lowercased", "validation_perplexity", "bleu", "chrf", "training_loss", "seconds_training"),
    plotted=("bleu_lowercased", "validation_perplexity"),
    rules=read_rules("""
        label smoothing of 0.1 raises perplexity by at least 1 %
            validation_perplexity of 0.1 / validation_perplexity of 0.0 >= 1.01
        label smoothing of 0.1 raises BLEU by at least 0.2
            bleu_lowercased of 0.1 - bleu_lowercased of 0.0 >= 0.2
    """),
    reading="Perplexity is that of the right tokens given the right tokens before, without smoothing in any arm; the "
    "training loss of an arm includes its smoothing and cannot be compared.",
)
