"""Activations, gates and hidden sizes of the feed-forward network."""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.budgets import ON_SUBWORDS
from monoblock.experiments.experiment import Arm
from monoblock.experiments.rules import read_rules

WIDTH = 256


def _arm(name: str, about: str, activation: str, *, gated: bool = False, factor: float = 4) -> Arm:
    hidden = round(WIDTH * factor * (2 / 3 if gated else 1) / 8) * 8
    changes = (f"model.activation={activation}", f"model.gated={str(gated).lower()}", f"model.hidden={hidden}")
    return Arm(name, about, changes)


EXPERIMENT = replace(
    ON_SUBWORDS,
    name="feedforward",
    claim="GELU is smoother than ReLU and better, SwiGLU slightly better still, though most variants train to similar "
    "losses; four times the width is an empirical choice",
    source="A, feed-forward; C, the MLP; D, feed-forward; B §11",
    arms=(
        _arm("relu", "ReLU, the paper's choice", "relu"),
        _arm("gelu", "GELU", "gelu_tanh"),
        _arm("silu", "SiLU", "silu"),
        _arm("relu2", "squared ReLU", "relu2"),
        _arm("reglu", "ReLU with a gate", "relu", gated=True),
        _arm("geglu", "GELU with a gate", "gelu_tanh", gated=True),
        _arm("swiglu", "SiLU with a gate", "silu", gated=True),
        _arm("gelu-1x", "GELU, hidden size equal to the width", "gelu_tanh", factor=1),
        _arm("gelu-2x", "GELU, hidden size twice the width", "gelu_tanh", factor=2),
        _arm("gelu-8x", "GELU, hidden size eight times the width", "gelu_tanh", factor=8),
    ),
    smoke_arms=("relu", "swiglu", "gelu-8x"),
    rules=read_rules("""
        GELU has at least 0.1 % less loss than ReLU
            loss of gelu / loss of relu <= 0.999
        SwiGLU has at least 0.1 % less loss than GELU
            loss of swiglu / loss of gelu <= 0.999
        the losses of SwiGLU and GELU differ by at most 1 %
            0.99 <= loss of swiglu / loss of gelu <= 1.01 [later: the upper bound]
        four times the width is at least 0.5 % better than once
            loss of gelu / loss of gelu-1x <= 0.995
        eight times the width is at most 0.5 % better than four times
            loss of gelu-8x / loss of gelu >= 0.995
    """),
    reading="The gated networks have two thirds of the hidden size, so that all arms without a factor in their name "
    "have about as many parameters.",
)
