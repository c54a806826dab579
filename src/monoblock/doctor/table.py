"""The checks as data: what each needs, and which findings of others each explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from monoblock.doctor.checks import (
    attention,
    cache,
    causality,
    fit,
    generation,
    gradients,
    leaks,
    numerics,
    optimizer,
    padding,
    positions,
    training_run,
    training_start,
    weights,
)
from monoblock.doctor.examination import Examination
from monoblock.doctor.report import Outcome


@dataclass(frozen=True)
class Check:
    """One check.  A finding of it makes those of the checks in `explains` redundant: it is their cause."""

    name: str
    about: str
    run: Callable[[Examination], Outcome]
    needs: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    group: str = "structure"
    cheap: bool = False
    max_parameters: float = float("inf")  # left out for larger models, to keep a report quick


EVERYTHING_MEASURED = (
    "causality",
    "prefix",
    "window",
    "padding",
    "batch",
    "packing",
    "cache",
    "cross_padding",
    "positions",
    "mask_after_softmax",
    "collapse",
    "overfit",
    "initial_loss",
)
TEXT = ("tokens",)

CHECKS: tuple[Check, ...] = (
    # The order is that of explanation: what makes other checks meaningless comes first.
    Check(
        "overflow",
        "outputs and activations are finite and fit into fp16",
        numerics.check_overflow,
        explains=(*EVERYTHING_MEASURED, "dropout", "residual_growth", "gradient_flow", "learning_rate", "heads"),
        cheap=True,
    ),
    Check(
        "dropout",
        "two runs agree; the declared dropout reaches every layer",
        weights.check_dropout,
        explains=(*EVERYTHING_MEASURED, "label_shift", "pad_in_loss", "heads"),
        cheap=True,
    ),
    Check(
        "mask_after_softmax",
        "weights that reach the values sum to 1",
        attention.check_mask_after_softmax,
        ("tokens", "attention"),
        explains=("causality", "padding", "cache", "cross_padding", "window", "batch", "packing"),
        cheap=True,
    ),
    Check(
        "softmax_precision",
        "the softmax is computed in 32 bits",
        attention.check_softmax_precision,
        ("attention",),
        explains=("cache", "padding", "causality", "packing", "batch", "cross_padding"),
        cheap=True,
    ),
    Check(
        "scale",
        "scores are divided by sqrt(head size), or as configured",
        attention.check_scale,
        ("attention",),
        explains=("collapse",),
        cheap=True,
    ),
    Check(
        "batch",
        "a row does not depend on its neighbours",
        leaks.check_batch,
        explains=("causality", "padding", "packing", "cache", "cross_padding", "positions"),
        cheap=True,
    ),
    Check(
        "causality",
        "no output depends on later tokens",
        causality.check_causality,
        ("tokens", "causal"),
        explains=("cache", "padding", "packing", "window", "prefix"),
        cheap=True,
    ),
    Check(
        "prefix",
        "no output depends on tokens after it and after the prefix",
        leaks.check_prefix,
        ("tokens", "per_token", "prefix"),
        cheap=True,
    ),
    Check(
        "window",
        "each layer sees as many keys as its window says",
        leaks.check_window,
        ("tokens", "window"),
        explains=("cache",),
        cheap=True,
    ),
    Check("positions", "positions are used", positions.check_positions, TEXT, cheap=True, explains=("cache",)),
    Check(
        "positions_twice",
        "positions are added or rotated once",
        positions.check_positions_twice,
        TEXT,
        explains=("cache",),
        cheap=True,
    ),
    Check("position_offset", "the first position is the right one", positions.check_position_offset, TEXT, cheap=True),
    Check(
        "padding", "padding changes nothing", padding.check_padding, ("tokens", "mask"), explains=("cache",), cheap=True
    ),
    Check(
        "cross_padding",
        "padding of the source changes nothing",
        padding.check_cross_padding,
        ("tokens", "source"),
        cheap=True,
    ),
    Check(
        "packing",
        "packed documents do not see each other",
        leaks.check_packing,
        ("tokens", "per_token", "documents"),
        cheap=True,
    ),
    Check(
        "cache",
        "steps with the cache give what the full pass gives",
        cache.check_cache,
        ("tokens", "causal", "per_token", "cache"),
    ),
    Check(
        "tying",
        "embedding and output share a tensor if they are meant to",
        weights.check_tying,
        ("tokens", "module"),
        cheap=True,
    ),
    Check(
        "tokenizer",
        "the tokenizer fits the model",
        fit.check_tokenizer,
        ("tokens", "tokenizer"),
        group="fit",
        cheap=True,
    ),
    Check(
        "head",
        "the head is trained and has as many outputs as there are classes",
        fit.check_head,
        ("module",),
        group="fit",
        cheap=True,
    ),
    Check("model_type", "the kind of model fits the task", fit.check_model_type, TEXT, group="fit", cheap=True),
    Check("context", "texts fit into the context", fit.check_context, TEXT, group="fit", cheap=True),
    Check(
        "generation_defaults",
        "the decoding options are possible",
        generation.check_generation_defaults,
        ("tokens", "generation"),
        group="fit",
        cheap=True,
    ),
    Check(
        "label_shift",
        "labels are the next tokens",
        training_start.check_label_shift,
        ("tokens", "batch_or_step", "per_token"),
        explains=("overfit", "initial_loss"),
        group="training",
        cheap=True,
    ),
    Check(
        "pad_in_loss",
        "padding is left out of the loss",
        training_start.check_pad_in_loss,
        ("tokens", "batch"),
        group="training",
        cheap=True,
    ),
    Check(
        "initial_loss",
        "the first loss is that of a guess, ln V",
        training_start.check_initial_loss,
        ("batch_or_run",),
        explains=("overfit",),
        group="training",
        cheap=True,
    ),
    Check(
        "gradient_flow",
        "gradients reach every block",
        gradients.check_gradient_flow,
        ("module",),
        explains=("overfit", "optimizer", "learning_rate"),
        group="training",
    ),
    Check(
        "optimizer",
        "the optimizer holds the weights of the model",
        optimizer.check_optimizer,
        ("optimizer",),
        explains=("overfit", "learning_rate"),
        group="training",
        cheap=True,
    ),
    Check(
        "overfit",
        "a few steps learn one batch",
        training_start.check_overfit,
        ("module", "batch"),
        group="training",
        max_parameters=3e7,
    ),
    Check(
        "learning_rate",
        "the learning rate moves the loss down",
        optimizer.check_learning_rate,
        ("training",),
        explains=("clipping", "warmup", "train_eval_gap"),
        group="training",
    ),
    Check(
        "optimizer_settings",
        "beta2 and weight decay are usual",
        optimizer.check_optimizer_settings,
        ("optimizer_or_run",),
        group="training",
        cheap=True,
    ),
    Check("warmup", "post-norm models warm up", training_run.check_warmup, ("run",), group="training", cheap=True),
    Check(
        "clipping",
        "gradients with spikes are clipped",
        training_run.check_clipping,
        ("run",),
        group="training",
        cheap=True,
    ),
    Check(
        "train_eval_gap",
        "the loss on held-out data follows that of training",
        training_run.check_train_eval_gap,
        ("run",),
        group="training",
        cheap=True,
    ),
    Check(
        "repeated_data",
        "data are not repeated without need",
        training_run.check_repeated_data,
        ("batch_or_run",),
        group="training",
        cheap=True,
    ),
    Check(
        "heads",
        "every head computes something of its own",
        attention.check_heads,
        ("attention",),
        group="training",
        cheap=True,
    ),
    Check(
        "collapse",
        "attention does not collapse to single keys",
        attention.check_collapse,
        ("attention",),
        group="training",
        cheap=True,
    ),
    Check(
        "residual_growth",
        "the residual stream does not explode",
        numerics.check_residual_growth,
        ("module",),
        group="training",
        cheap=True,
    ),
)
