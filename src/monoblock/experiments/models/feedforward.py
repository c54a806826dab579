"""Feed-forward networks: activations with and without a gate at equal parameters, and the factor of the hidden size."""

from __future__ import annotations

from dataclasses import replace

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

WIDTH = 256


def _arm(name: str, about: str, activation: str, *, gated: bool = False, factor: float = 4) -> Arm:
    hidden = round(WIDTH * factor * (2 / 3 if gated else 1) / 8) * 8
    changes = (f"model.activation={activation}", f"model.gated={str(gated).lower()}", f"model.hidden={hidden}")
    return Arm(name=name, about=about, changes=changes)


def _ratio(arm: str, other: str, words: str, **bound: float) -> Rule:
    return Rule(statement=words, metric="loss", arm=arm, quantity="ratio", other=other, **bound)  # type: ignore[arg-type]


EXPERIMENT = Experiment(
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
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=(*SUBWORD_MODEL, *NO_DROPOUT),
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    smoke_arms=("relu", "swiglu", "gelu-8x"),
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by 4,096 subwords, test split",
    columns=("loss", "perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        _ratio("gelu", "relu", "GELU has at least 0.1 % less loss than ReLU", at_most=0.999),
        _ratio("swiglu", "gelu", "SwiGLU has at least 0.1 % less loss than GELU", at_most=0.999),
        replace(
            _ratio(
                "swiglu", "gelu", "the losses of SwiGLU and GELU differ by at most 1 %", at_least=0.99, at_most=1.01
            ),
            late="the upper bound",
        ),
        _ratio("gelu", "gelu-1x", "four times the width is at least 0.5 % better than once", at_most=0.995),
        _ratio("gelu-8x", "gelu", "eight times the width is at most 0.5 % better than four times", at_least=0.995),
    ),
    reading="The gated networks have two thirds of the hidden size, so that all arms without a factor in their name "
    "have about as many parameters.",
)
