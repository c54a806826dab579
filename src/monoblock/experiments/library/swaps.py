"""From the block of 2017 to that of LLaMA, one swap at a time.

All arms have about as many parameters: the gated network has two thirds of the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from monoblock.experiments.budgets import ON_WORDS, TEXT_SMOKE
from monoblock.experiments.experiment import Arm
from monoblock.experiments.rules import Rule, read_rules

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
    """Yield the arms; each adds a swap to the arm before."""
    knobs = dict(PAPER)
    for name, (about, changes) in SWAPS.items():
        knobs |= changes
        yield Arm(
            name, f"and {about}" if changes else about, tuple(f"model.{knob}={value}" for knob, value in knobs.items())
        )


def _each_swap(words: str, bound: str, added_later: str = "") -> Iterator[Rule]:
    for before, name in pairwise(SWAPS):
        statement = f"{SWAPS[name][0]}: the loss falls by {words}"
        yield Rule(statement, f"loss of {name} / loss of {before} {bound}", added_later=added_later)


EXPERIMENT = replace(
    ON_WORDS,
    name="swaps",
    claim="each modern swap is a small win of 0.1 to 1 %",
    source="A, common variations; B §11",
    arms=tuple(_arms()),
    smoke=(*TEXT_SMOKE, "model.heads=8"),
    seeds=(1, 2, 3, 4, 5),
    rules=(
        *_each_swap("at least 0.1 %", "<= 0.999"),
        Rule("all swaps together lower the loss by at least 1 %", "loss of qk-norm / loss of 2017 <= 0.99"),
        *_each_swap("at most 1 %", ">= 0.99", "the rule"),
        *read_rules("""
            from ReLU to SwiGLU, with RMSNorm and no biases: the loss falls by at least 0.1 %
                loss of swiglu / loss of rotary <= 0.999 [later: the rule]
        """),
    ),
    reading="Each arm contains the swaps of the arms above it, and a rule compares it with the arm just above. A swap "
    "that costs nothing in loss, such as fewer key and value heads, may still be worth it for its speed. The arm "
    "init changes three settings at once, because a small initialization needs unscaled embeddings, and fixed "
    "sinusoids would be far larger. SwiGLU follows GELU: the last rule compares it with ReLU.",
)
