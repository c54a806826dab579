"""Find nearest neighbours by cosine similarity."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

BATCH_SIZE = 1024  # queries compared with all candidates at once


class Neighbour(NamedTuple):
    row: int  # index of the candidate
    cosine: float


def find_nearest(vectors: Tensor, candidates: Tensor, count: int) -> list[list[Neighbour]]:
    """Find the `count` candidates (M, D) nearest to each vector (N, D), nearest first; ties keep their order."""
    queries, keys = F.normalize(vectors, dim=-1), F.normalize(candidates, dim=-1)
    neighbours = []
    for batch in queries.split(BATCH_SIZE):
        cosines = batch @ keys.T  # (batch, M)
        order = cosines.argsort(dim=-1, descending=True, stable=True)[:, :count]
        for row, indices in zip(cosines, order.tolist(), strict=True):
            neighbours.append([Neighbour(index, row[index].item()) for index in indices])
    return neighbours
