"""The softmax with and without the scale of the scores, by head size.

Queries and keys are random vectors with d independent entries of variance 1, so that a score q · k has variance d. For
each d the entropy of the softmax over 64 keys is measured, and the size of its gradient with respect to the scores: the
Frobenius norm of its Jacobian, whose mean is dominated by the few rows with two large scores, and its median.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from monoblock.experiments.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.rules import read_rules

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
CURVES = ("gradient", "median_gradient", "entropy", "largest_weight", "variance")
KEYS, QUERIES, SMOKE_QUERIES = 64, 1024, 64


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Measure the softmax of random scores for every size of the head."""
    generator = torch.Generator().manual_seed(trial.seed)
    queries = SMOKE_QUERIES if trial.smoke else QUERIES
    curves: dict[str, dict[str, float]] = {name: {} for name in CURVES}
    for size in SIZES:
        q = torch.randn(queries, size, generator=generator, dtype=torch.float64)
        k = torch.randn(queries, KEYS, size, generator=generator, dtype=torch.float64)
        scores = torch.einsum("qd,qkd->qk", q, k)
        if trial.arm.name == "scaled":
            scores = scores / size**0.5
        weights = scores.softmax(-1)
        norms = jacobian_norm(weights)
        found = {
            "gradient": norms.mean(),
            "median_gradient": norms.median(),
            "entropy": -(weights * scores.log_softmax(-1)).sum(-1).mean(),
            "largest_weight": weights.amax(-1).mean(),
            "variance": scores.var(),
        }
        for name, value in found.items():
            curves[name][str(size)] = float(value)
    last = str(SIZES[-1])
    yield {**curves, "entropy_1024": curves["entropy"][last], "gradient_1024": curves["gradient"][last]}


def jacobian_norm(weights: Tensor) -> Tensor:
    """Return the Frobenius norm of diag(p) - p p^T for each row p, the Jacobian of the softmax.

    Its square is sum_i p_i^2 - 2 sum_i p_i^3 + (sum_i p_i^2)^2.
    """
    squares = weights.square().sum(-1)
    return (squares - 2 * weights.pow(3).sum(-1) + squares.square()).clamp(min=0).sqrt()


EXPERIMENT = Experiment(
    name="scale",
    claim="without the division by the square root of the head size, scores grow with it, and the softmax saturates: "
    "its gradients become tiny",
    source="B §04; D, scaled dot product; E §8.2.3",
    arms=(
        Arm("scaled", "scores divided by the square root of the head size"),
        Arm("unscaled", "plain dot products"),
    ),
    measure=measure,
    seeds=(1, 2, 3, 4, 5),
    budget="1,024 random queries with 64 keys for each size, in double precision",
    data="independent normal entries with variance 1",
    columns=("entropy_1024", "gradient_1024"),
    curves=dict.fromkeys(CURVES, "head size"),
    logarithmic=True,
    rules=read_rules("""
        without the scale, the variance of the scores at size 1,024 is at least 100 times that at size 8
            variance of unscaled at 1024 / variance of unscaled at 8 >= 100
        with the scale, the entropy at size 1,024 is that at size 8, within 10 %
            0.9 <= entropy of scaled at 1024 / entropy of scaled at 8 <= 1.1 [later: the upper bound]
        without the scale, the mean gradient at size 1,024 is at most a fifth of that with the scale
            gradient of unscaled at 1024 / gradient of scaled at 1024 <= 0.2
        without the scale, the median gradient at size 1,024 is at most a fifth of that with the scale
            median_gradient of unscaled at 1024 / median_gradient of scaled at 1024 <= 0.2
        without the scale, the largest weight at size 1,024 is at least 0.9
            largest_weight of unscaled at 1024 >= 0.9
    """),
    reading="`gradient` is the Frobenius norm of the Jacobian of the softmax. The largest entropy of 64 keys is 4.16 "
    "nats.",
)
