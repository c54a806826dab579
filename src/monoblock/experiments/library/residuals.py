"""24 layers with and without residual connections.

The norm of the gradient of each layer is measured in new models, and in trained ones. The arms whose names end in
"-start" only measure a new model: the gradient of the hidden states after each layer, and the factor by which it
changes from one layer to the one below. The textbook picture is a factor of 0.9 a layer, 0.9^24 = 0.08 for 24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.config.parts import EmbeddingConfig
from monoblock.experiments.budgets import LANGUAGE_MODEL, ON_WORDS
from monoblock.experiments.experiment import Arm, Metrics, Trial
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import evaluate_trial, train_and_load, trial_recipe
from monoblock.inspection.residual_stream import StackNorms, gradient_norms
from monoblock.model import Transformer
from monoblock.tasks.evaluation_report import EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import iterate_windows, tokenize_corpus

ROWS, LENGTH = 4, 64  # of the tokens; a text has rows of the model's context
DEPTH = 24


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure the gradients of a new model; train and evaluate it, unless the arm is only about the start."""
    if trial.arm.values:
        base = gpt(vocab=512, width=128, depth=DEPTH, heads=4, context=LENGTH)
        yield new_gradients(vary(base, **trial.arm.values), trial.seed)
        return
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    config = pipe.model.config
    assert isinstance(config, ModelConfig)
    request = EvaluationRequest(data=recipe.data.corpus, folder=trial.data)
    after = trained_gradients(trained_norms(pipe, request).weight_gradients)
    yield {**evaluate_trial(trial, pipe, recipe), **metrics, **new_gradients(config, trial.seed), **after}


def new_gradients(config: ModelConfig, seed: int) -> Metrics:
    """Return the gradient norms of a new model on random tokens, by layer, and their mean factor per layer."""
    norms = initial_norms(config, seed)
    states, depth = norms.gradients, len(norms.weight_gradients)
    ratio = states[0] / states[-1] if states[-1] else 0.0
    return {
        "gradient": {str(layer): value for layer, value in enumerate(states)},
        "weight_gradient": by_layer(norms.weight_gradients),
        "first_weight_gradient": norms.weight_gradients[0],
        "first_to_last": ratio,
        "factor_per_layer": ratio ** (1 / depth),
    }


def trained_gradients(norms: list[float]) -> Metrics:
    """Return the gradient norms of the weights of a trained model, by layer, and that of the first layer."""
    return {"trained_weight_gradient": by_layer(norms), "first_trained_gradient": norms[0]}


def by_layer(norms: list[float]) -> dict[str, float]:
    return {str(layer): value for layer, value in enumerate(norms, 1)}


def initial_norms(config: ModelConfig, seed: int, device: str = "cpu") -> StackNorms:
    """Return the norms of the last stack of a new model, with the gradients of its layers, in fp64.

    In fp32, the gradients of a deep stack without residuals and norms would vanish altogether.
    """
    torch.manual_seed(seed)
    model = Transformer(config).to(device, torch.float64).eval()
    assert isinstance(config.input, EmbeddingConfig)
    length = min(LENGTH, config.context or LENGTH)
    texts = 1 if config.encoder is None else 2
    ids = [torch.randint(config.input.vocab, (ROWS, length), device=device) for _ in range(texts)]
    return gradient_norms(model, *ids)[-1]


def trained_norms(loaded: LoadedModel, request: EvaluationRequest) -> StackNorms:
    """Return the norms of a trained language model on the first rows of the text of a request, in fp64."""
    config = loaded.model.config
    assert isinstance(config, ModelConfig)
    tokens = tokenize_corpus(read_corpus(request, ("text", "tokens")), loaded.tokenizer)
    ids = next(iterate_windows(tokens, config.context or LENGTH, ROWS)).inputs["source"]
    model = Transformer(config)
    model.load_state_dict(loaded.model.state_dict())
    return gradient_norms(model.double().eval(), ids)[-1]


def _start(name: str, about: str, residual: str, norm: str) -> Arm:
    values = {"residual": residual, "norm": norm}
    return Arm(f"{name}-start", f"{about}; not trained", uses_recipe=False, values=values)


EXPERIMENT = replace(
    ON_WORDS,
    name="residuals",
    claim="without residual connections a factor of 0.9 per layer leaves 0.9^24 = 0.08 of the gradient after 24 "
    "layers; with them it arrives at full strength",
    source="C, question 3; A, the block; B §06; D, residual connections; E §8.5.2",
    arms=(
        _start("residual", "residuals and norms", "sequential", "layer"),
        _start("none", "norms without residuals", "none", "layer"),
        _start("residual-bare", "residuals without norms", "sequential", "none"),
        _start("bare", "neither residuals nor norms", "none", "none"),
        Arm("residual", "residuals and norms; trained", ("model.residual=sequential",)),
        Arm("none", "norms without residuals; trained", ("model.residual=none",)),
    ),
    measure=measure,
    changes=(
        *(*LANGUAGE_MODEL, f"model.depth={DEPTH}", "model.width=128", "model.heads=4", "model.hidden=512"),
        "train.spike_threshold=0.0",  # without residuals the gradient jumps, which would stop the run
    ),
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
    rules=read_rules("""
        without residuals the gradient of the first layer is below a tenth of that with residuals
            first_weight_gradient of none-start / first_weight_gradient of residual-start <= 0.1
        in a stack without norms, it is below a tenth of that with residuals
            first_weight_gradient of bare-start / first_weight_gradient of residual-bare-start <= 0.1
        with residuals at least half of the gradient arrives below the first layer
            first_to_last of residual-start >= 0.5
        without residuals each layer passes on at most 0.9 of the gradient
            factor_per_layer of none-start <= 0.9
        without residuals the trained model has at least 1.5 times the perplexity
            perplexity of none / perplexity of residual >= 1.5
        after training without residuals, the gradient of the first layer is below a tenth of that with residuals
            first_trained_gradient of none / first_trained_gradient of residual <= 0.1 [later: the rule]
        in a new model with norms and without residuals, the gradient of the first layer is at least ten times that \
with residuals
            first_weight_gradient of none-start / first_weight_gradient of residual-start >= 10 [later: the rule]
    """),
    reading="`first_to_last` is the gradient of the input of the first layer divided by that of the output of the "
    "last, and `factor_per_layer` is its 24th root. With residuals they can exceed 1, because every layer adds a path. "
    "Norms rescale the gradient together with the activations, so the stacks without norms are measured beside them.",
)
