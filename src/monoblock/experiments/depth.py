"""Deep stacks: residual connections, and the place of the norms, with and without warm-up.

The norm of the gradient of each layer is measured in new models, and in trained ones. The arms whose names end in
"-start" only measure a new model: the gradient of the hidden states after each layer, and the factor by which it
changes from one layer to the one below. The textbook picture is a factor of 0.9 a layer, 0.9^24 = 0.08 for 24. In a
post-norm stack the gradient is largest near the output, which is what warm-up compensates (Xiong et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monoblock.config.families import gpt
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.config.parts import EmbeddingConfig
from monoblock.experiments.budgets import (
    LANGUAGE_MODEL,
    TEXT_SMOKE,
    TEXT_STAND_IN,
    TRANSLATION,
    TRANSLATION_SMOKE,
    TRANSLATION_STAND_IN,
)
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import evaluate_trial, train_and_load, trial_recipe
from monoblock.inspection.residual_stream import StackNorms, gradient_norms
from monoblock.model import Transformer
from monoblock.tasks.evaluation_report import EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.running_text import iterate_windows, tokenize_corpus

ROWS, LENGTH = 4, 64  # of the tokens; a text has rows of the model's context


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


DEPTH, VOCAB, RESIDUALS_WIDTH, RESIDUALS_HEADS = 24, 512, 128, 4


def measure_residuals(trial: Trial) -> Iterator[str | Metrics]:
    """Measure the gradients of a new model; train and evaluate it, unless the arm is only about the start."""
    values = trial.arm.values
    if "norm" in values:
        base = gpt(vocab=VOCAB, width=RESIDUALS_WIDTH, depth=DEPTH, heads=RESIDUALS_HEADS, context=LENGTH)
        yield new_gradients(vary(base, residual=values["residual"], norm=values["norm"]), trial.seed)
        return
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    config = pipe.model.config
    assert isinstance(config, ModelConfig)
    request = EvaluationRequest(data=recipe.data.corpus, folder=trial.data)
    after = trained_gradients(trained_norms(pipe.loaded, request).weight_gradients)
    yield {**evaluate_trial(trial, pipe, recipe), **metrics, **new_gradients(config, trial.seed), **after}


def new_gradients(config: ModelConfig, seed: int) -> Metrics:
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


RESIDUALS = Experiment(
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
    measure=measure_residuals,
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
        Rule(
            "without residuals the gradient of the first layer is below a tenth of that with residuals",
            "first_weight_gradient of none-start / first_weight_gradient of residual-start <= 0.1",
        ),
        Rule(
            "in a stack without norms, it is below a tenth of that with residuals",
            "first_weight_gradient of bare-start / first_weight_gradient of residual-bare-start <= 0.1",
        ),
        Rule(
            "with residuals at least half of the gradient arrives below the first layer",
            "first_to_last of residual-start >= 0.5",
        ),
        Rule(
            "without residuals each layer passes on at most 0.9 of the gradient",
            "factor_per_layer of none-start <= 0.9",
        ),
        Rule(
            "without residuals the trained model has at least 1.5 times the perplexity",
            "perplexity of none / perplexity of residual >= 1.5",
        ),
        Rule(
            "after training without residuals, the gradient of the first layer is below a tenth of that with residuals",
            "first_trained_gradient of none / first_trained_gradient of residual <= 0.1",
            added_later="the rule",
        ),
        Rule(
            "in a new model with norms and without residuals, the gradient of the first layer is at least ten times "
            "that with residuals",
            "first_weight_gradient of none-start / first_weight_gradient of residual-start >= 10",
            added_later="the rule",
        ),
    ),
    reading="`first_to_last` is the gradient of the input of the first layer divided by that of the output of the "
    "last, and `factor_per_layer` is its 24th root. With residuals they can exceed 1, because every layer adds a path. "
    "Norms rescale the gradient together with the activations, so the stacks without norms are measured beside them.",
)


PLACES, WARMUPS, DEPTHS, DEFAULT_DEPTH = ("pre", "post", "sandwich"), (1, 800), (2, 6, 12, 24), 6
# Peak learning rates: the higher is that of Xiong et al. 2020, the lower that of document A.
HIGH_RATE, LOW_RATE = "1e-3", "3e-4"
# Without CUDA graphs, which need batches of one shape, the pairs of a batch have similar lengths. To compile 24 layers
# takes as long as to train them, so they are not compiled.
SORTED, MAX_COMPILED_DEPTH = "train.compile=no", 12


def measure_placement(trial: Trial) -> Iterator[str | Metrics]:
    """Train and evaluate a translation model, and measure the gradients of its layers before training."""
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    config = pipe.model.config
    assert isinstance(config, ModelConfig)
    scores = evaluate_trial(trial, pipe, recipe, limit=8 if trial.smoke else None)
    yield {**metrics, **scores, **initial_gradients(config, trial.seed, str(pipe.model.device))}


def initial_gradients(config: ModelConfig, seed: int, device: str) -> Metrics:
    """Return the norm of the gradient of the weights of each decoder layer of a new model."""
    norms = initial_norms(config, seed, device).weight_gradients
    curve = {str(layer): value for layer, value in enumerate(norms, 1)}
    return {"gradient": curve, "gradient_last_to_first": norms[-1] / norms[0] if norms[0] else float("inf")}


def _placement_arm(
    place: str, warmup: int, depth: int = DEFAULT_DEPTH, *, rate: str = HIGH_RATE, is_sorted: bool = False
) -> Arm:
    suffix = "" if depth == DEFAULT_DEPTH else f"-depth{depth}"
    about = f"{place}-norm, {depth} layers, {warmup} warm-up step{'s' if warmup > 1 else ''}"
    changes = [f"model.norm_place={place}", f"train.warmup={warmup}", f"model.depth={depth}"]
    if rate != HIGH_RATE:
        suffix += f"-lr{rate}"
        about += f", learning rate {rate}"
        changes.append(f"train.lr={rate}")
    if is_sorted or depth > MAX_COMPILED_DEPTH:
        suffix += "-sorted"
        about += ", batches of similar lengths"
        changes.append(SORTED)
    return Arm(name=f"{place}-warmup{warmup}{suffix}", about=about, changes=tuple(changes))


def _placement_arms() -> Iterator[Arm]:
    for depth in DEPTHS:
        yield from (_placement_arm(place, warmup, depth) for place in PLACES for warmup in WARMUPS)
    yield from (_placement_arm("pre", warmup, is_sorted=True) for warmup in WARMUPS)
    yield from (
        _placement_arm(place, warmup, rate=LOW_RATE, is_sorted=True) for place in ("pre", "post") for warmup in WARMUPS
    )


HALF = "post-norm without warm-up has at most half the BLEU that it has with warm-up"
SMALL_LOSS = "pre-norm without warm-up loses at most 0.5 BLEU"

NORM_PLACEMENT = Experiment(
    name="norm-placement",
    claim="pre-norm trains deep stacks without warm-up; post-norm needs warm-up and breaks beyond about 24 layers",
    source="A, pre-norm; B §10; C, pre-norm; D, layer normalization; E §8.5.3",
    arms=tuple(_placement_arms()),
    default_arms=tuple(_placement_arm(place, warmup).name for place in PLACES for warmup in WARMUPS),
    measure=measure_placement,
    recipe="multi30k",
    changes=(*TRANSLATION, f"train.lr={HIGH_RATE}", "train.clip=0.0", "train.spike_threshold=0.0"),
    stand_in=TRANSLATION_STAND_IN,
    toy="pairs",
    smoke=TRANSLATION_SMOKE,
    smoke_arms=("pre-warmup1", "post-warmup800", "sandwich-warmup1"),
    budget="3,000 steps of 256 pairs for every arm, a peak learning rate of 1e-3 (in some arms 3e-4), no gradient "
    "clipping",
    data="Multi30k from German to English, test split of 2016",
    columns=(
        *("bleu_lowercased", "bleu", "validation_loss", "training_loss", "gradient_last_to_first", "skipped"),
        *("parameters", "seconds_training"),
    ),
    curves={"gradient": "decoder layer", "loss_by_step": "step"},
    plotted=("bleu_lowercased",),
    logarithmic=True,
    rules=(
        Rule(HALF, "bleu_lowercased of post-warmup1 / bleu_lowercased of post-warmup800 <= 0.5"),
        Rule(SMALL_LOSS, "bleu_lowercased of pre-warmup800 - bleu_lowercased of pre-warmup1 <= 0.5"),
        Rule(
            "in a new post-norm model the gradient of the last layer is at least twice that of the first",
            "gradient_last_to_first of post-warmup800 >= 2",
        ),
        Rule(
            "at 24 layers, post-norm with warm-up has at most half the BLEU of pre-norm",
            "bleu_lowercased of post-warmup800-depth24-sorted / bleu_lowercased of pre-warmup800-depth24-sorted <= 0.5",
            added_later="this pair of arms",
        ),
        Rule(
            f"at a learning rate of {LOW_RATE}, {HALF}",
            "bleu_lowercased of post-warmup1-lr3e-4-sorted / bleu_lowercased of post-warmup800-lr3e-4-sorted <= 0.5",
            added_later="this pair of arms",
        ),
        Rule(
            f"at a learning rate of {LOW_RATE}, {SMALL_LOSS}",
            "bleu_lowercased of pre-warmup800-lr3e-4-sorted - bleu_lowercased of pre-warmup1-lr3e-4-sorted <= 0.5",
            added_later="this pair of arms",
        ),
        Rule(
            f"with batches of similar lengths, {SMALL_LOSS}",
            "bleu_lowercased of pre-warmup800-sorted - bleu_lowercased of pre-warmup1-sorted <= 0.5",
            added_later="this pair of arms",
        ),
    ),
    reading="The learning rate rises to its peak in 1 or 800 steps; document A recommends a peak of 3e-4. The curve of "
    "gradients is that of a new model on random tokens, by layer of the decoder.",
)
