"""Learning rate schedules: the learning rate as a function of the step, with warm-up and then decay."""

from __future__ import annotations

import math
from collections.abc import Callable

from monoblock.errors import ConfigError, did_you_mean

# A function from the progress after warm-up (0 to 1) to the learning rate, where 1 is the peak and 0 the floor.
DecayCurve = Callable[[float], float]
WSD_DECAY = 0.2  # the fraction of the steps, the last ones, in which "wsd" falls linearly


DECAY_CURVES: dict[str, DecayCurve] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": lambda progress: min(1.0, (1 - progress) / WSD_DECAY),  # warmup, stable, decay (Hu et al. 2024)
}


def noam(step: int, width: int, warmup: int) -> float:
    """Return width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, eq. 3); the first step is 1."""
    return width**-0.5 * min(step**-0.5, step * max(warmup, 1) ** -1.5)


def learning_rate(
    name: str, step: int, *, peak: float, steps: int, warmup: int = 0, floor: float = 0.0, width: int = 512
) -> float:
    """Return the learning rate of update `step`, counted from 0.

    `name` is "noam" or a key of DECAY_CURVES. The learning rate falls from `peak` to peak × `floor`. For "noam", `peak`
    is a factor on the formula of the paper, and `width` is d_model.
    """
    if name == "noam":
        return peak * noam(step + 1, width, warmup)
    if name not in DECAY_CURVES:
        raise ConfigError(
            f"schedule={name!r} is not one of noam, {', '.join(DECAY_CURVES)}"
            f"{did_you_mean(name, [*DECAY_CURVES, 'noam'])}"
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1 - floor) * DECAY_CURVES[name](progress))
