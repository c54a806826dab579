"""Stacks of 24 layers with and without residual connections: gradients before and after training, and perplexity.

The arms whose names end in "-start" only measure a new model: the norm of the gradient of the hidden states after each
layer, and the factor by which it changes from one layer to the one below. The textbook picture is a factor of 0.9 for
each layer, 0.9^24 = 0.08 for 24. The other arms also train the model and measure its gradients again, on text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import evaluate_trial, train_and_load
from monoblock.experiments.models.budgets import LANGUAGE_MODEL, TEXT_SMOKE, TEXT_STAND_IN
from monoblock.experiments.models.gradients import initial_norms, trained_norms
from monoblock.tasks.evaluation_report import EvaluationRequest

DEPTH, VOCAB, WIDTH, HEADS, LENGTH = 24, 512, 128, 4, 64


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure the gradients of a new model; train and evaluate it, unless the arm is only about the start."""
    values = trial.arm.values
    if "norm" in values:
        base = gpt(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, context=LENGTH)
        yield gradients(vary(base, residual=values["residual"], norm=values["norm"]), trial.seed)
        return
    for event in train_and_load(trial):
        if isinstance(event, str):
            yield event
            continue
        pipe, recipe, metrics = event
        config = pipe.model.config
        assert isinstance(config, ModelConfig)
        request = EvaluationRequest(data=recipe.data.corpus, folder=trial.data)
        after = trained_gradients(trained_norms(pipe.loaded, request).weight_gradients)
        yield {**evaluate_trial(trial, pipe, recipe), **metrics, **gradients(config, trial.seed), **after}


def gradients(config: ModelConfig, seed: int) -> Metrics:
    """Return the gradient norms of a new model on random tokens, by layer, and their mean factor per layer."""
    norms = initial_norms(config, seed)
    states, depth = norms.gradients, len(norms.weight_gradients)
    ratio = states[0] / states[-1] if states[-1] else 0.0
    return {
        "gradient": {str(layer): value for layer, value in enumerate(states)},
        "weight_gradient": _by_layer(norms.weight_gradients),
        "first_weight_gradient": norms.weight_gradients[0],
        "first_to_last": ratio,
        "factor_per_layer": ratio ** (1 / depth),
    }


def trained_gradients(norms: list[float]) -> Metrics:
    """Return the gradient norms of the weights of a trained model, by layer, and that of the first layer."""
    return {"trained_weight_gradient": _by_layer(norms), "first_trained_gradient": norms[0]}


def _by_layer(norms: list[float]) -> dict[str, float]:
    return {str(layer): value for layer, value in enumerate(norms, 1)}


def _start(name: str, about: str, residual: str, norm: str) -> Arm:
    values = {"residual": residual, "norm": norm}
    return Arm(name=f"{name}-start", about=f"{about}; not trained", uses_recipe=False, values=values)


def _trained(name: str, about: str, residual: str) -> Arm:
    return Arm(name=name, about=f"{about}; trained", changes=(f"model.residual={residual}",))


def _first_layer(statement: str, arm: str, other: str, *, metric: str = "first_weight_gradient", **bound: Any) -> Rule:
    """Bound the gradient of the first layer of an arm, divided by that of another arm."""
    return Rule(statement=statement, metric=metric, arm=arm, quantity="ratio", other=other, **bound)


EXPERIMENT = Experiment(
    name="residuals",
    claim="without residual connections a factor of 0.9 per layer leaves 0.9^24 = 0.08 of the gradient after 24 "
    "layers; with them it arrives at full strength",
    source="C, question 3; A, the block; B §06; D, residual connections; E §8.5.2",
    arms=(
        _start("residual", "residuals and norms", "sequential", "layer"),
        _start("none", "norms without residuals", "none", "layer"),
        _start("residual-bare", "residuals without norms", "sequential", "none"),
        _start("bare", "neither residuals nor norms", "none", "none"),
        _trained("residual", "residuals and norms", "sequential"),
        _trained("none", "norms without residuals", "none"),
    ),
    measure=measure,
    recipe="wikitext2",
    changes=(
        *(*LANGUAGE_MODEL, f"model.depth={DEPTH}", "model.width=128", "model.heads=4", "model.hidden=512"),
        "train.spike_threshold=0.0",  # without residuals the gradient jumps, which would stop the run
    ),
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    seeds=(1, 2, 3, 4, 5),
    budget="24 pre-norm layers of width 128; the trained arms have 2,000 steps of 32 blocks of 256 words",
    data="random tokens for the gradients of new models; WikiText-2 by words for training, test split",
    columns=(
        *("first_to_last", "factor_per_layer", "first_weight_gradient", "first_trained_gradient", "perplexity"),
        *("validation_loss", "training_loss", "parameters", "seconds_training"),
    ),
    curves={
        **dict.fromkeys(("gradient", "weight_gradient", "trained_weight_gradient"), "layer"),
        "loss_by_step": "step",
    },
    logarithmic=True,
    floor=1e-4,
    guides={"gradient": 0.9},
    rules=(
        _first_layer(
            "without residuals the gradient of the first layer is below a tenth of that with residuals",
            "none-start",
            "residual-start",
            at_most=0.1,
        ),
        _first_layer(
            "in a stack without norms, it is below a tenth of that with residuals",
            "bare-start",
            "residual-bare-start",
            at_most=0.1,
        ),
        Rule(
            statement="with residuals at least half of the gradient arrives below the first layer",
            metric="first_to_last",
            arm="residual-start",
            at_least=0.5,
        ),
        Rule(
            statement="without residuals each layer passes on at most 0.9 of the gradient",
            metric="factor_per_layer",
            arm="none-start",
            at_most=0.9,
        ),
        Rule(
            statement="without residuals the trained model has at least 1.5 times the perplexity",
            metric="perplexity",
            arm="none",
            quantity="ratio",
            other="residual",
            at_least=1.5,
        ),
        _first_layer(
            "after training without residuals, the gradient of the first layer is below a tenth of that with residuals",
            "none",
            "residual",
            metric="first_trained_gradient",
            at_most=0.1,
            late="the rule",
        ),
        _first_layer(
            "in a new model with norms and without residuals, the gradient of the first layer is at least ten times "
            "that with residuals",
            "none-start",
            "residual-start",
            at_least=10.0,
            late="the rule",
        ),
    ),
    reading="`first_to_last` is the gradient of the input of the first layer divided by that of the output of the "
    "last, and `factor_per_layer` is its 24th root. With residuals they can exceed 1, because every layer adds a path. "
    "Norms rescale the gradient together with the activations, so the stacks without norms are measured beside them.",
)
