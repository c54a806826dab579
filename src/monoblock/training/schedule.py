"""Learning rate schedules as pure functions of the step: warm-up, then decay."""

from __future__ import annotations

import math
from collections.abc import Callable

from monoblock.errors import ConfigError, did_you_mean

DecayCurve = Callable[[float], float]  # progress after warm-up, from 0 to 1 -> fraction of the peak above the floor


def _wsd(decay: float) -> DecayCurve:
    """Return the warmup-stable-decay curve (Hu et al. 2024): the peak, then linear in the last fraction `decay`."""
    return lambda progress: min(1.0, (1 - progress) / decay)


DECAY_CURVES: dict[str, DecayCurve] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": _wsd(0.2),
}


def noam(step: int, width: int, warmup: int) -> float:
    """Return width^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1 (Vaswani et al. 2017, eq. 3)."""
    return width**-0.5 * min(step**-0.5, step * max(warmup, 1) ** -1.5)


def learning_rate(
    name: str, step: int, *, peak: float, steps: int, warmup: int = 0, floor: float = 0.0, width: int = 512
) -> float:
    """Return the learning rate of update `step`, counted from 0.

    `name` is "noam" or a key of DECAY_CURVES. `floor` is the fraction of the peak reached at the end. For "noam",
    `peak` is a factor on the formula of the paper and `width` its d_model.
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
