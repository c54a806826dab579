"""Which tokens linear attention has summed, and which are still in the ring of its cache (linear_state.py)."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.nn.token_positions import TokenPositions


class LinearWrite(NamedTuple):
    """Which tokens of a row are in the ring, and which leave it in this pass; the same in all linear blocks."""

    in_ring: Tensor  # (B, R) the column holds a token that the new tokens see
    leaving: Tensor  # (B, R) this token is added to the sums now
    skips_ring: Tensor | None  # (B, T) this new token is added to the sums at once; None if all new tokens fit
    is_started: Tensor  # (B,) the sums are not empty

    @classmethod
    def prepare(cls, new_positions: TokenPositions, lengths: Tensor, max_written: Tensor, capacity: int) -> Self:
        """Prepare a pass over new tokens after `lengths` tokens (B,).

        `max_written` (B,) is the largest number of tokens in a row before this pass: all but the last `capacity` of
        them are in the sums.
        """
        if new_positions.document is not None:
            raise InputError(
                "linear attention cannot cache packed documents; give each document a row of its own, or cache=None"
            )
        T, valid = new_positions.length, new_positions.valid
        counts = lengths.new_full((1, 1), T) if valid is None else valid.sum(-1, keepdim=True)
        before, summed = lengths[:, None], (max_written[:, None] - capacity).clamp(min=0)
        summed_after = torch.maximum(summed, before + counts - capacity)
        column = torch.arange(capacity, device=lengths.device)
        token_index = summed + (column - summed) % capacity  # (B, R) of the token in each column
        in_ring = token_index < before
        skips_ring = None
        if capacity < T:
            ones = torch.ones(1, T, dtype=torch.long, device=lengths.device) if valid is None else valid.long()
            skips_ring = (before + ones.cumsum(-1) - 1 < summed_after) & ones.bool()
        return cls(in_ring, in_ring & (token_index < summed_after), skips_ring, summed[:, 0] > 0)
