"""Language models that differ in one part: heads, depth, feed-forward network, what is left out, swapped or tied."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from monoblock.experiments.budgets import (
    LANGUAGE_MODEL_BUDGET,
    NO_DROPOUT,
    SUBWORD_MODEL,
    TEXT_SMOKE,
    experiment_on_subwords,
    experiment_on_words,
)
from monoblock.experiments.frame.experiment import Arm, Metrics, SeedResults, Trial
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import evaluate_trial, train_and_load, trial_recipe

# Arm -> (what is removed, the changes).
REMOVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("nothing is removed", ()),
    "no-attention": ("attention: a token sees only itself", ("model.window=1",)),
    "no-feedforward": ("the feed-forward networks", ("model.hidden=0",)),
    # Gradients jump without residuals; no update is left out.
    "no-residual": ("the residual connections", ("model.residual=none", "train.spike_threshold=0.0")),
    "no-norm": ("the norms", ("model.norm=none",)),
    "no-positions": ("the positions", ("model.positions=none",)),
    "no-scale": ("the division by the square root of the head size", ("model.scale=1.0",)),
    "one-head": ("several heads: the one head has the whole width", ("model.heads=1",)),
    "no-dropout": ("dropout", NO_DROPOUT),
    "no-warmup": ("the warm-up of the learning rate", ("train.warmup=0",)),
    "no-clipping": (
        "the clipping of gradients, and without leaving out updates with large ones",
        ("train.clip=0.0", "train.spike_threshold=0.0"),
    ),
}


def _costs(arm: str, words: str, factor: float, *, added_later: str = "") -> Rule:
    return Rule(
        f"without {words}, perplexity is at least {factor - 1:.0%} higher",
        f"perplexity of {arm} / perplexity of full >= {factor}",
        added_later=added_later,
    )


COMPONENTS = experiment_on_subwords(
    name="components",
    claim="attention, feed-forward networks, residuals, norms, positions and the scale are each necessary",
    source="A, five ingredients; D, summary; E §8.1.3",
    arms=tuple(
        Arm(name=name, about=about if name == "full" else f"without {about}", changes=changes)
        for name, (about, changes) in REMOVED.items()
    ),
    changes=SUBWORD_MODEL,
    logarithmic=True,
    columns=("perplexity", "validation_loss", "training_loss", "skipped", "parameters", "seconds_training"),
    rules=(
        _costs("no-attention", "attention", 1.2),
        _costs("no-feedforward", "feed-forward networks", 1.02),
        _costs("no-residual", "residual connections", 1.05),
        _costs("no-norm", "norms", 1.02),
        _costs("no-positions", "positions", 1.02),
        _costs("no-scale", "the scale", 1.02),
        _costs("one-head", "several heads", 1.02),
        _costs("no-warmup", "warm-up", 1.02),
        _costs("no-positions", "positions", 2.0, added_later="the rule"),
        _costs("no-dropout", "dropout", 1.02, added_later="the rule"),
        _costs("no-clipping", "the clipping of gradients", 1.02, added_later="this arm"),
    ),
    reading="The model is pre-norm with rotary positions. An arm without feed-forward networks has fewer "
    "parameters too. The arm without dropout is here for comparison: with a budget this small it can be better than "
    "the full model.",
)


HEADS_WIDTH, HEAD_COUNTS = 256, (1, 2, 4, 8, 16, 32, 64)


def _better(arm: str, other: str, factor: float, words: str) -> Rule:
    return Rule(words, f"perplexity of {arm} / perplexity of {other} <= {factor}")


HEADS = experiment_on_subwords(
    name="heads",
    claim="several heads are better than one, 8 or 16 are standard, and beyond that each head becomes too small",
    source="A, multi-head attention; B §05; E §8.3",
    arms=tuple(
        Arm(
            name=str(count),
            about=f"{count} {'head' if count == 1 else 'heads'} of size {HEADS_WIDTH // count}",
            changes=(f"model.heads={count}",),
        )
        for count in HEAD_COUNTS
    ),
    smoke=(*TEXT_SMOKE, "model.width=128"),
    columns=("perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        _better("8", "1", 0.99, "eight heads are at least 1 % better than one"),
        _better("16", "1", 0.99, "sixteen heads are at least 1 % better than one"),
        _better("8", "64", 0.99, "eight heads are at least 1 % better than 64, which have only four features each"),
    ),
    reading="All arms have the same number of parameters.",
)


# Depth -> (width, heads): 12 · depth · width² is 4.7 to 5.3 million, and heads have 32 features.
DEPTHS = {1: (640, 20), 2: (448, 14), 4: (320, 10), 6: (256, 8), 8: (224, 7), 12: (192, 6), 24: (128, 4)}


def _deep_arm(depth: int, width: int, heads: int) -> Arm:
    sizes = (f"model.depth={depth}", f"model.width={width}", f"model.heads={heads}", f"model.hidden={4 * width}")
    return Arm(
        name=f"{depth}x{width}", about=f"{depth} {'layer' if depth == 1 else 'layers'} of width {width}", changes=sizes
    )


DEPTH_WIDTH = experiment_on_subwords(
    name="depth-width",
    claim="at a fixed number of parameters, depth is worth more than width, up to a point",
    source="E §8.5.6; A, the block",
    arms=tuple(_deep_arm(depth, *shape) for depth, shape in DEPTHS.items()),
    smoke_arms=("1x640", "24x128"),
    budget=f"{LANGUAGE_MODEL_BUDGET}; 4.7 to 5.3 million parameters in the blocks",
    rules=(
        Rule("six layers have at least 1 % less loss than one wide layer", "loss of 6x256 / loss of 1x640 <= 0.99"),
        Rule(
            "24 narrow layers are not better than six: their loss is at most 0.5 % lower",
            "loss of 24x128 / loss of 6x256 >= 0.995",
        ),
    ),
    reading="The embedding is not part of the budget, so the total number of parameters differs by what a wider "
    "embedding has; a deep model takes longer, because its layers come one after the other.",
)


FEEDFORWARD_WIDTH = 256


def _feedforward_arm(name: str, about: str, activation: str, *, gated: bool = False, factor: float = 4) -> Arm:
    hidden = round(FEEDFORWARD_WIDTH * factor * (2 / 3 if gated else 1) / 8) * 8
    changes = (f"model.activation={activation}", f"model.gated={str(gated).lower()}", f"model.hidden={hidden}")
    return Arm(name=name, about=about, changes=changes)


FEEDFORWARD = experiment_on_subwords(
    name="feedforward",
    claim="GELU is smoother than ReLU and better, SwiGLU slightly better still, though most variants train to similar "
    "losses; four times the width is an empirical choice",
    source="A, feed-forward; C, the MLP; D, feed-forward; B §11",
    arms=(
        _feedforward_arm("relu", "ReLU, the paper's choice", "relu"),
        _feedforward_arm("gelu", "GELU", "gelu_tanh"),
        _feedforward_arm("silu", "SiLU", "silu"),
        _feedforward_arm("relu2", "squared ReLU", "relu2"),
        _feedforward_arm("reglu", "ReLU with a gate", "relu", gated=True),
        _feedforward_arm("geglu", "GELU with a gate", "gelu_tanh", gated=True),
        _feedforward_arm("swiglu", "SiLU with a gate", "silu", gated=True),
        _feedforward_arm("gelu-1x", "GELU, hidden size equal to the width", "gelu_tanh", factor=1),
        _feedforward_arm("gelu-2x", "GELU, hidden size twice the width", "gelu_tanh", factor=2),
        _feedforward_arm("gelu-8x", "GELU, hidden size eight times the width", "gelu_tanh", factor=8),
    ),
    smoke_arms=("relu", "swiglu", "gelu-8x"),
    rules=(
        Rule("GELU has at least 0.1 % less loss than ReLU", "loss of gelu / loss of relu <= 0.999"),
        Rule("SwiGLU has at least 0.1 % less loss than GELU", "loss of swiglu / loss of gelu <= 0.999"),
        Rule(
            "the losses of SwiGLU and GELU differ by at most 1 %",
            "0.99 <= loss of swiglu / loss of gelu <= 1.01",
            added_later="the upper bound",
        ),
        Rule("four times the width is at least 0.5 % better than once", "loss of gelu / loss of gelu-1x <= 0.995"),
        Rule(
            "eight times the width is at most 0.5 % better than four times", "loss of gelu-8x / loss of gelu >= 0.995"
        ),
    ),
    reading="The gated networks have two thirds of the hidden size, so that all arms without a factor in their name "
    "have about as many parameters.",
)


# From the block of 2017 to that of LLaMA, one swap at a time: each arm adds one to the arm before. All arms have about
# as many parameters: the gated network has two thirds of the hidden size.
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


def _swap_arms() -> Iterator[Arm]:
    knobs = dict(PAPER)
    for number, (name, (about, changes)) in enumerate(SWAPS.items()):
        knobs |= changes
        yield Arm(
            name=name,
            about=about if number == 0 else f"and {about}",
            changes=tuple(f"model.{knob}={value}" for knob, value in knobs.items()),
        )


SWAPS_OF_2017 = experiment_on_words(
    name="swaps",
    claim="each modern swap is a small win of 0.1 to 1 %",
    source="A, common variations; B §11",
    arms=tuple(_swap_arms()),
    smoke=(*TEXT_SMOKE, "model.heads=8"),
    seeds=(1, 2, 3, 4, 5),
    rules=(
        *(
            Rule(f"{SWAPS[name][0]}: the loss falls by at least 0.1 %", f"loss of {name} / loss of {before} <= 0.999")
            for before, name in pairwise(SWAPS)
        ),
        Rule("all swaps together lower the loss by at least 1 %", "loss of qk-norm / loss of 2017 <= 0.99"),
        *(
            Rule(
                f"{SWAPS[name][0]}: the loss falls by at most 1 %",
                f"loss of {name} / loss of {before} >= 0.99",
                added_later="the rule",
            )
            for before, name in pairwise(SWAPS)
        ),
        Rule(
            "from ReLU to SwiGLU, with RMSNorm and no biases: the loss falls by at least 0.1 %",
            "loss of swiglu / loss of rotary <= 0.999",
            added_later="the rule",
        ),
    ),
    reading="Each arm contains the swaps of the arms above it, and a rule compares it with the arm just above. A swap "
    "that costs nothing in loss, such as fewer key and value heads, may still be worth it for its speed. The arm "
    "init changes three settings at once, because a small initialization needs unscaled embeddings, and fixed "
    "sinusoids would be far larger. SwiGLU follows GELU: the last rule compares it with ReLU.",
)


TYING = experiment_on_words(
    name="tying",
    claim="sharing the embedding with the output matrix saves parameters and often improves the model",
    source="B §10; A, parameters",
    arms=(
        Arm(name="tied", about="one matrix for embedding and output", changes=("model.tie=output",)),
        Arm(name="untied", about="a matrix of its own for the output", changes=("model.tie=none",)),
    ),
    seeds=(1, 2, 3, 4, 5),
    columns=("perplexity", "loss", "validation_loss", "training_loss", "parameters", "seconds_training"),
    rules=(
        Rule("tying lowers perplexity by at least 1 %", "perplexity of tied / perplexity of untied <= 0.99"),
        Rule(
            "tying saves at least a quarter of the parameters of this model",
            "parameters of tied / parameters of untied <= 0.75",
            is_exact=True,
        ),
    ),
    reading="With 33,278 words the embedding is most of a small model, so tying saves more here than in a large one.",
)


# The scaling law is the straight line of log loss over log parameters of the blocks, by least squares, for every seed;
# its slope is the negative exponent, and the residuals give its standard error. Kaplan et al. (2020) found 0.076 for
# models that are limited by their size alone.
SIZES = ((2, 32), (2, 64), (3, 96), (4, 128), (5, 192), (6, 256))  # depth and width


def measure_size(trial: Trial) -> Iterator[str | Metrics]:
    recipe = trial_recipe(trial)
    pipe, metrics = yield from train_and_load(trial, recipe)
    blocks = sum(tensor.numel() for name, tensor in pipe.model.named_parameters() if name.startswith("decoder."))
    yield {**evaluate_trial(trial, pipe, recipe), **metrics, "block_parameters": blocks}


def summarize(results: SeedResults) -> SeedResults:
    """Return the row "fit" for every seed that all sizes have: the exponent, its standard error, and a prediction.

    `predicted` is the loss that the law fitted to the smaller sizes gives for the largest, divided by the measured one.
    """
    sizes = [arm for arm in results if arm != "fit"]
    if len(sizes) < 3:
        return {}
    seeds = set.intersection(*(set(results[arm]) for arm in sizes))
    fits: dict[int, dict[str, Any]] = {}
    for seed in sorted(seeds):
        points = [(results[arm][seed]["block_parameters"], results[arm][seed]["loss"]) for arm in sizes]
        logs = sorted((math.log(x), math.log(y)) for x, y in points)
        slope, error = fit_line(*zip(*logs, strict=True))
        fits[seed] = {"exponent": -slope, "exponent_error": error, "predicted": predict_last(logs)}
    return {"fit": fits} if fits else {}


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the least-squares line and its standard error."""
    count, mean_x, mean_y = len(x), sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / max(1, count - 2) / spread)


def predict_last(points: Sequence[tuple[float, float]]) -> float:
    """Return exp(y) of the last point by the line through the others, divided by its own."""
    *others, (x, y) = points
    slope, start = statistics.linear_regression(*zip(*others, strict=True))
    return math.exp(start + slope * x - y)


def _sized_arm(depth: int, width: int) -> Arm:
    sizes = (f"model.depth={depth}", f"model.width={width}", f"model.heads={width // 32}", f"model.hidden={4 * width}")
    return Arm(name=f"{depth}x{width}", about=f"{depth} layers of width {width}", changes=sizes)


SCALING_LAW = experiment_on_subwords(
    name="scaling-law",
    claim="the loss falls as a power of the number of parameters",
    source="A, why the Transformer won; C, further reading",
    arms=tuple(_sized_arm(*shape) for shape in SIZES),
    measure=measure_size,
    summarize=summarize,
    changes=(*SUBWORD_MODEL, *NO_DROPOUT, "train.steps=1000"),
    smoke_arms=("2x32", "2x64", "3x96"),
    budget=LANGUAGE_MODEL_BUDGET.replace("2,000", "1,000"),
    columns=(
        *(
            "loss",
            "exponent",
            "exponent_error",
            "predicted",
            "block_parameters",
            "parameters",
            "validation_loss",
            "training_loss",
        ),
        "seconds_training",
    ),
    scatter=("block_parameters", "loss"),
    rules=(
        Rule("the loss falls with size: the exponent is at least 0.02", "exponent of fit >= 0.02"),
        Rule(
            "the standard error of the exponent is at most a fifth of it",
            "exponent_error of fit / exponent of fit <= 0.2",
        ),
        Rule(
            "the law of the five smaller sizes predicts the loss of the largest to 0.5 %",
            "0.995 <= predicted of fit <= 1.005",
            added_later="the rule",
        ),
    ),
    reading="The exponent counts the parameters of the blocks, without the embedding. All sizes see the same tokens, a "
    "few passes over a small corpus, with one learning rate, so the exponent is not that of models limited by their "
    "size alone (0.076 in Kaplan et al. 2020). `predicted` is the loss that the law fitted to the smaller sizes gives "
    "for the largest, divided by the measured one. The training loss is above the others because the splits differ: "
    "2.7 % of the words of the training split are <unk>, 5.5 % of the validation and 6.3 % of the test split.",
)
