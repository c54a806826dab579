"""Pre-, post- and sandwich norm, with and without warm-up, by depth.

In a post-norm stack the gradient is largest near the output, which is what warm-up compensates (Xiong et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator

from monoblock.config.model import ModelConfig
from monoblock.experiments.budgets import TRANSLATION, TRANSLATION_SMOKE, TRANSLATION_STAND_IN
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.library.residuals import by_layer, initial_norms
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import evaluate_trial, train_and_load, trial_recipe

PLACES, WARMUPS, DEPTHS, DEFAULT_DEPTH = ("pre", "post", "sandwich"), (1, 800), (2, 6, 12, 24), 6
# Peak learning rates: the higher is that of Xiong et al. 2020, the lower that of document A.
HIGH_RATE, LOW_RATE = "1e-3", "3e-4"
# Without CUDA graphs, which need batches of one shape, the pairs of a batch have similar lengths. To compile 24 layers
# takes as long as to train them, so they are not compiled.
SORTED, MAX_COMPILED_DEPTH = "train.compile=no", 12


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train and evaluate a translation model, and measure the gradients of its layers before training."""
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    config = pipe.model.config
    assert isinstance(config, ModelConfig)
    scores = evaluate_trial(trial, pipe, recipe, limit=8 if trial.smoke else None)
    norms = initial_norms(config, trial.seed, str(pipe.model.device)).weight_gradients
    ratio = norms[-1] / norms[0] if norms[0] else float("inf")
    yield {**metrics, **scores, "gradient": by_layer(norms), "gradient_last_to_first": ratio}


def _arm(place: str, warmup: int, depth: int = DEFAULT_DEPTH, rate: str = HIGH_RATE, *, is_sorted: bool = False) -> Arm:
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
    return Arm(f"{place}-warmup{warmup}{suffix}", about, tuple(changes))


EXPERIMENT = Experiment(
    name="norm-placement",
    claim="pre-norm trains deep stacks without warm-up; post-norm needs warm-up and breaks beyond about 24 layers",
    source="A, pre-norm; B §10; C, pre-norm; D, layer normalization; E §8.5.3",
    arms=(
        *(_arm(place, warmup, depth) for depth in DEPTHS for place in PLACES for warmup in WARMUPS),
        *(_arm("pre", warmup, is_sorted=True) for warmup in WARMUPS),
        *(_arm(place, warmup, rate=LOW_RATE, is_sorted=True) for place in ("pre", "post") for warmup in WARMUPS),
    ),
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
    rules=read_rules("""
        post-norm without warm-up has at most half the BLEU that it has with warm-up
            bleu_lowercased of post-warmup1 / bleu_lowercased of post-warmup800 <= 0.5
        pre-norm without warm-up loses at most 0.5 BLEU
            bleu_lowercased of pre-warmup800 - bleu_lowercased of pre-warmup1 <= 0.5
        in a new post-norm model the gradient of the last layer is at least twice that of the first
            gradient_last_to_first of post-warmup800 >= 2
        at 24 layers, post-norm with warm-up has at most half the BLEU of pre-norm
            bleu_lowercased of post-warmup800-depth24-sorted / bleu_lowercased of pre-warmup800-depth24-sorted <= 0.5 \
[later: this pair of arms]
        at a learning rate of 3e-4, post-norm without warm-up has at most half the BLEU that it has with warm-up
            bleu_lowercased of post-warmup1-lr3e-4-sorted / bleu_lowercased of post-warmup800-lr3e-4-sorted <= 0.5 \
[later: this pair of arms]
        at a learning rate of 3e-4, pre-norm without warm-up loses at most 0.5 BLEU
            bleu_lowercased of pre-warmup800-lr3e-4-sorted - bleu_lowercased of pre-warmup1-lr3e-4-sorted <= 0.5 \
[later: this pair of arms]
        with batches of similar lengths, pre-norm without warm-up loses at most 0.5 BLEU
            bleu_lowercased of pre-warmup800-sorted - bleu_lowercased of pre-warmup1-sorted <= 0.5 \
[later: this pair of arms]
    """),
    reading="The learning rate rises to its peak in 1 or 800 steps; document A recommends a peak of 3e-4. The curve of "
    "gradients is that of a new model on random tokens, by layer of the decoder.",
)
