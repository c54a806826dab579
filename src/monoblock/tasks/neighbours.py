"""Which vectors lie nearest: cosines against many at once, the best of them in order."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

ROWS = 1024  # vectors that are compared at once


class Neighbour(NamedTuple):
    number: int
    cosine: float


def nearest(vectors: Tensor, others: Tensor, count: int) -> list[list[Neighbour]]:
    """For each of (n, D) the `count` nearest of (m, D) by cosine, nearest first; of equals the first."""
    ours, theirs = F.normalize(vectors, dim=-1), F.normalize(others, dim=-1)
    found = []
    for some in ours.split(ROWS):
        cosines = some @ theirs.T
        order = cosines.argsort(dim=-1, descending=True, stable=True)[:, :count]
        for row, places in zip(cosines, order.tolist(), strict=True):
            found.append([Neighbour(place, row[place].item()) for place in places])
    return found
