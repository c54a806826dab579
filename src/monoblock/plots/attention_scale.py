"""Choose how attention weights become colours, and reduce maps that are larger than their picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_LABELLED = 40  # tokens of a map that is coloured by the largest weight; longer ones by uniform attention
LEAST_RATIO, MOST_RATIO = 0.1, 100.0  # of a weight and that of uniform attention, from dark to bright
Array = NDArray[np.floating[Any]]
MaskArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Scale:
    """How the weights of a head become colours from 0 to 1."""

    label: str
    ticks: Mapping[float, str]
    is_relative: bool  # to uniform attention, by the logarithm; else to the largest weight of the head

    def apply(self, weights: Array, mask: MaskArray | None) -> Array:
        """Return a number from 0 to 1 for each weight (T, S), and -1 where the mask is False."""
        if not self.is_relative:
            return hide(weights / max(float(weights.max()), 1e-9), mask)
        count = weights.shape[1] if mask is None else mask.sum(-1, keepdims=True)  # keys that a query may attend to
        decades = np.log10(np.clip(weights * count, LEAST_RATIO, MOST_RATIO) / LEAST_RATIO)
        return hide(decades / np.log10(MOST_RATIO / LEAST_RATIO), mask)


def choose_scale(length: int) -> Scale:
    """Choose how maps of several heads are coloured, by the number of their tokens.

    A short text: each head from 0 to its largest weight. A long text: how many times a weight is that of uniform
    attention, by the logarithm, since one large weight would else make all others black.
    """
    if length <= MAX_LABELLED:
        places = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        return Scale("weight / largest weight of the head", {place: f"{place:g}" for place in places}, False)
    ticks = {0.0: "1/10 or less", 1 / 3: "1 (uniform)", 2 / 3: "10", 1.0: "100 or more"}
    return Scale("weight / weight of uniform attention (logarithmic)", ticks, True)


def hide(weights: Array, mask: MaskArray | None) -> Array:
    """Return the weights with -1 where the mask is False."""
    return weights if mask is None else np.where(mask, weights, -1.0)


def reduce_map(values: Array, size: int) -> Array:
    """Reduce a map to at most `size` pixels in each direction; a pixel is the largest value of its cells."""
    for axis in (0, 1):
        length = values.shape[axis]
        if length > size:
            starts = np.unique(np.linspace(0, length, size, endpoint=False).astype(int))
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values
