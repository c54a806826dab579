"""Pre-, post- and sandwich norm, with and without warm-up, in encoder-decoders of 2 to 24 layers.

Each arm translates Multi30k. Before training, the norm of the gradient of the weights of each decoder layer is measured
on random tokens: in a post-norm stack it is largest near the output, which is what warm-up compensates (Xiong et al.
2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from monoblock.config.model import ModelConfig
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import evaluate_trial, train_and_load
from monoblock.experiments.models.budgets import TRANSLATION, TRANSLATION_SMOKE, TRANSLATION_STAND_IN
from monoblock.experiments.models.gradients import initial_norms

PLACES, WARMUPS, DEPTHS, DEFAULT_DEPTH = ("pre", "post", "sandwich"), (1, 800), (2, 6, 12, 24), 6
# Peak learning rates: the higher is that of Xiong et al. 2020, the lower that of document A.
HIGH_RATE, LOW_RATE = "1e-3", "3e-4"
# Without CUDA graphs, which need batches of one shape, the pairs of a batch have similar lengths. To compile 24 layers
# takes as long as to train them, so they are not compiled.
SORTED, MAX_COMPILED_DEPTH = "train.compile=no", 12
SORTED_LOW: dict[str, Any] = {"rate": LOW_RATE, "is_sorted": True}


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train and evaluate a translation model, and measure the gradients of its layers before training."""
    for event in train_and_load(trial):
        if isinstance(event, str):
            yield event
            continue
        pipe, recipe, metrics = event
        config = pipe.model.config
        assert isinstance(config, ModelConfig)
        scores = evaluate_trial(trial, pipe, recipe, limit=8 if trial.smoke else None)
        yield {**metrics, **scores, **initial_gradients(config, trial.seed, str(pipe.model.device))}


def initial_gradients(config: ModelConfig, seed: int, device: str) -> Metrics:
    """Return the norm of the gradient of the weights of each decoder layer of a new model."""
    norms = initial_norms(config, seed, device).weight_gradients
    curve = {str(layer): value for layer, value in enumerate(norms, 1)}
    return {"gradient": curve, "gradient_last_to_first": norms[-1] / norms[0] if norms[0] else float("inf")}


def _arm(place: str, warmup: int, depth: int = DEFAULT_DEPTH, *, rate: str = HIGH_RATE, is_sorted: bool = False) -> Arm:
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


def _arms() -> Iterator[Arm]:
    for depth in DEPTHS:
        yield from (_arm(place, warmup, depth) for place in PLACES for warmup in WARMUPS)
    yield from (_arm("pre", warmup, is_sorted=True) for warmup in WARMUPS)
    yield from (_arm(place, warmup, **SORTED_LOW) for place in ("pre", "post") for warmup in WARMUPS)


def _without_warmup(statement: str, place: str, **kind: Any) -> Rule:
    """Compare the BLEU without warm-up with that with it: the ratio for post-norm, the difference for pre-norm."""
    without, with_warmup = (_arm(place, warmup, **kind).name for warmup in WARMUPS)
    is_post = place == "post"
    return Rule(
        statement=statement,
        metric="bleu_lowercased",
        arm=without if is_post else with_warmup,
        quantity="ratio" if is_post else "difference",
        other=with_warmup if is_post else without,
        at_most=0.5,
        late="this pair of arms" if kind else "",
    )


HALF = "post-norm without warm-up has at most half the BLEU that it has with warm-up"
SMALL_LOSS = "pre-norm without warm-up loses at most 0.5 BLEU"

EXPERIMENT = Experiment(
    name="norm-placement",
    claim="pre-norm trains deep stacks without warm-up; post-norm needs warm-up and breaks beyond about 24 layers",
    source="A, pre-norm; B §10; C, pre-norm; D, layer normalization; E §8.5.3",
    arms=tuple(_arms()),
    default_arms=tuple(_arm(place, warmup).name for place in PLACES for warmup in WARMUPS),
    measure=measure,
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
        _without_warmup(HALF, "post"),
        _without_warmup(SMALL_LOSS, "pre"),
        Rule(
            statement="in a new post-norm model the gradient of the last layer is at least twice that of the first",
            metric="gradient_last_to_first",
            arm=_arm("post", 800).name,
            at_least=2.0,
        ),
        Rule(
            statement="at 24 layers, post-norm with warm-up has at most half the BLEU of pre-norm",
            metric="bleu_lowercased",
            arm=_arm("post", 800, 24).name,
            quantity="ratio",
            other=_arm("pre", 800, 24).name,
            at_most=0.5,
            late="this pair of arms",
        ),
        _without_warmup(f"at a learning rate of {LOW_RATE}, {HALF}", "post", **SORTED_LOW),
        _without_warmup(f"at a learning rate of {LOW_RATE}, {SMALL_LOSS}", "pre", **SORTED_LOW),
        _without_warmup(f"with batches of similar lengths, {SMALL_LOSS}", "pre", is_sorted=True),
    ),
    reading="The learning rate rises to its peak in 1 or 800 steps; document A recommends a peak of 3e-4. The curve of "
    "gradients is that of a new model on random tokens, by layer of the decoder.",
)
