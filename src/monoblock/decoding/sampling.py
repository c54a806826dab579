"""Sampling that depends on nothing but (seed, sequence, step), so that other rows of the batch never change a row.

Each step of a sequence has one uniform number; the inverse of the cumulative distribution turns it into a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DRAW_SIZE = 64  # numbers drawn at a time


class RandomStream:
    """Uniform numbers in [0, 1), one for each step of a sequence, that depend only on the seed and the stream index."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=[seed, stream]))
        self.buffer: list[float] = []

    def __getitem__(self, step: int) -> float:
        while step >= len(self.buffer):
            self.buffer += self.generator.random(DRAW_SIZE).tolist()
        return self.buffer[step]


def fresh_seed() -> int:
    """Draw a seed from torch's generator, so that `torch.manual_seed` determines it."""
    return int(torch.randint(2**62, ()))


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample tokens (B,): the first at which the cumulative distribution of logits (B, V) exceeds `uniforms` (B,)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniforms[:, None].to(cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[-1] - 1)[:, 0]
