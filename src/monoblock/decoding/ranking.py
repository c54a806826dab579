"""The best continuations of each text among all tokens of all its beams, without a softmax over the vocabulary.

log p = logit - log Σ exp, so the order of a row is that of its logits, and one number a row makes rows comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 128  # numbers of which only the largest is looked at first
LEAST = 16  # below, pieces are not worth it


def best(logits: Tensor, scores: Tensor, without: Sequence[int], copies: int, count: int) -> tuple[Tensor, Tensor]:
    """Of logits (rows, V), `copies` rows a text: the `count` best sums of score and log-probability, and their places.

    A place is beam · V + token.  The tokens of `without` are never among them, though they keep their probability.
    """
    count = min(count, copies * logits.shape[-1])
    if _kernel(logits):
        ruled = torch.tensor(without, dtype=torch.long)
        return torch.ops.monoblock.best(logits.contiguous(), scores, ruled, copies, count)
    totals = logits + (scores - logits.logsumexp(-1))[:, None]
    if without:
        totals[:, torch.tensor(without, device=logits.device)] = -math.inf
    return ranked(totals.view(len(logits) // copies, -1), count)


def _kernel(logits: Tensor) -> bool:
    """Whether the kernels are loaded and read this."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and hasattr(torch.ops.monoblock, "best")


def ranked(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """topk of (B, N); on a CPU the best of a row are looked for in those of its pieces that have the largest peaks."""
    size = _piece(rows.shape[-1]) if rows.device.type == "cpu" else 1
    if size < LEAST or rows.shape[-1] // size <= 2 * count:
        found = rows.topk(count)
        return found.values, found.indices
    pieces = rows.unflatten(-1, (-1, size))
    which = pieces.amax(-1).topk(count).indices.sort(-1).values  # in their order, so that of equals the first is taken
    some = pieces.gather(1, which[..., None].expand(-1, -1, size)).flatten(1)
    found = some.topk(count)
    places = which.gather(1, found.indices // size) * size + found.indices % size
    return found.values, places


def _piece(length: int) -> int:
    """The largest size up to PIECE that divides a row."""
    return next(size for size in range(min(PIECE, length), 0, -1) if length % size == 0)
