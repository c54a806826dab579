"""One token from a distribution: the best, or one by chance.

Chance is a function of (seed, return number, step): one uniform number a step, turned into a token by the inverse of
the cumulative distribution, so that the rows around a row change nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 64  # numbers drawn at a time


class Noise:
    """The uniform numbers of one returned sequence: the same for the same seed, whatever happens around it."""

    def __init__(self, seed: int, number: int = 0) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=[seed, number]))
        self.drawn: list[float] = []

    def __getitem__(self, step: int) -> float:
        while step >= len(self.drawn):
            self.drawn += self.generator.random(BLOCK).tolist()
        return self.drawn[step]


def fresh_seed() -> int:
    """A seed from torch's generator, so that `torch.manual_seed` decides it."""
    return int(torch.randint(2**62, ()))


def choose(logits: Tensor, chances: Tensor) -> Tensor:
    """The tokens at which the cumulative distributions of the rows (B, V) pass the chances (B,)."""
    shares = logits.double().softmax(-1).cumsum(-1)
    mark = chances[:, None].to(shares) * shares[:, -1:]
    return torch.searchsorted(shares, mark, right=True).clamp(max=shares.shape[-1] - 1)[:, 0]
