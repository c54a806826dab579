"""From the block of 2017 to a block in the style of LLaMA, one swap at a time: each arm adds one to the arm before.

All arms have about as many parameters: the gated network has two thirds of the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from monoblock.experiments.frame.experiment import Arm, Experiment
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import train_and_evaluate
from monoblock.experiments.models.budgets import LANGUAGE_MODEL, LANGUAGE_MODEL_BUDGET, TEXT_SMOKE, TEXT_STAND_IN

PAPER = {
    "norm_place": "post",
    "norm": "layer",
    "activation": "relu",
    "gated": "false",
    "hidden": "1024",
    "positions": "sinusoid",
    "embedding_scale": "sqrt_width",
    "bias": "true",
    "kv_heads": "8",
    "qk_norm": "false",
    "init": "xavier",
    "tie": "output",
}
# Name -> (what is swapped, the knobs that change).
SWAPS: dict[str, tuple[str, dict[str, str]]] = {
    "2017": ("the block of the paper: post-norm, LayerNorm, ReLU, sinusoids, biases", {}),
    "pre-norm": ("norm before the sublayer", {"norm_place": "pre"}),
    "init": (
        "small normal initialization, with learned positions and embeddings that are not scaled",
        {"init": "normal", "embedding_scale": "1.0", "positions": "learned"},
    ),
    "rotary": ("rotary positions", {"positions": "rotary"}),
    "gelu": ("GELU instead of ReLU", {"activation": "gelu_tanh"}),
    "rms": ("RMSNorm instead of LayerNorm", {"norm": "rms"}),
    "no-bias": ("no biases in projections", {"bias": "false"}),
    "swiglu": ("SwiGLU with two thirds of the hidden size", {"activation": "silu", "gated": "true", "hidden": "688"}),
    "gqa": ("two key and value heads for eight query heads", {"kv_heads": "2"}),
    "qk-norm": ("normalized queries and keys", {"qk_norm": "true"}),
}


def _arms() -> Iterator[Arm]:
    knobs = dict(PAPER)
    for number, (name, (about, changes)) in enumerate(SWAPS.items()):
        knobs |= changes
        yield Arm(
            name=name,
            about=about if number == 0 else f"and {about}",
            changes=tuple(f"model.{knob}={value}" for knob, value in knobs.items()),
        )


def _ratio(arm: str, other: str, words: str, **bound: Any) -> Rule:
    return Rule(statement=words, metric="loss", arm=arm, quantity="ratio", other=other, **bound)


NAMES = list(SWAPS)
EXPERIMENT = Experiment(
    name="swaps",
    claim="each modern swap is a small win of 0.1 to 1 %",
    source="A, common variations; B §11",
    arms=tuple(_arms()),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=LANGUAGE_MODEL,
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=(*TEXT_SMOKE, "model.heads=8"),
    seeds=(1, 2, 3, 4, 5),
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by words, test split",
    columns=("loss", "perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        *(
            _ratio(name, before, f"{SWAPS[name][0]}: the loss falls by at least 0.1 %", at_most=0.999)
            for before, name in pairwise(NAMES)
        ),
        _ratio(NAMES[-1], NAMES[0], "all swaps together lower the loss by at least 1 %", at_most=0.99),
        *(
            _ratio(name, before, f"{SWAPS[name][0]}: the loss falls by at most 1 %", at_least=0.99, late="the rule")
            for before, name in pairwise(NAMES)
        ),
        _ratio(
            "swiglu",
            "rotary",
            "from ReLU to SwiGLU, with RMSNorm and no biases: the loss falls by at least 0.1 %",
            at_most=0.999,
            late="the rule",
        ),
    ),
    reading="Each arm contains the swaps of the arms above it, and a rule compares it with the arm just above. A swap "
    "that costs nothing in loss, such as fewer key and value heads, may still be worth it for its speed. The arm "
    "init changes three settings at once, because a small initialization needs unscaled embeddings, and fixed "
    "sinusoids would be far larger. SwiGLU follows GELU: the last rule compares it with ReLU.",
)
