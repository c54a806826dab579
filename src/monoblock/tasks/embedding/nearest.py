"""Find the nearest neighbours of vectors by cosine similarity."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

BATCH_SIZE = 1024  # vectors that are compared with all candidates at once


class Neighbour(NamedTuple):
    row: int  # the index of the neighbour among the candidates
    cosine: float


def find_nearest(vectors: Tensor, candidates: Tensor, count: int) -> list[list[Neighbour]]:
    """Find the `count` candidates nearest to each vector, nearest first; ties keep the order of the candidates.

    The shape of `vectors` is (N, D), and that of `candidates` is (M, D).
    """
    queries, keys = F.normalize(vectors, dim=-1), F.normalize(candidates, dim=-1)
    neighbours = []
    for batch in queries.split(BATCH_SIZE):
        cosines = batch @ keys.T  # (batch, M)
        order = cosines.argsort(dim=-1, descending=True, stable=True)[:, :count]
        for row, indices in zip(cosines, order.tolist(), strict=True):
            neighbours.append([Neighbour(index, row[index].item()) for index in indices])
    return neighbours
