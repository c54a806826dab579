"""Sample tokens with random numbers that depend only on seed, sequence and step, not on the other rows of a batch.

Each step of a sequence has one uniform random number; the inverse of the cumulative distribution turns it into a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DRAW_SIZE = 64  # numbers drawn at a time


class RandomStream:
    """Uniform random numbers in [0, 1) for the steps of one sequence, indexed by the number of the step.

    They depend only on `seed` and on `stream`, the index of the sequence.
    """

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
    """Sample one token per row from softmax(logits) by inverting its cumulative distribution.

    Each of the returned tokens (B,) is the first whose cumulative probability exceeds the row's number in `uniforms`.

    logits: (B, V).
    uniforms: (B,), numbers in [0, 1).
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniforms[:, None].to(cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[-1] - 1)[:, 0]
