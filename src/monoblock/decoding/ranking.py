"""The best continuations of each prompt among all tokens of all its beams, without a softmax over the vocabulary.

log p = logit - log Σ exp(logit): a row is ordered by its logits, and one logsumexp per row makes rows comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SEGMENT = 128  # values of which only the largest is compared at first
MIN_SEGMENT = 16  # shorter segments do not pay


def top_continuations(
    logits: Tensor, scores: Tensor, suppressed: Sequence[int], rows_per_prompt: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return each prompt's best sums of score and log-probability (prompts, count), and their beam · V + token.

    logits: (prompts · rows_per_prompt, V); scores: one for each row.
    suppressed: tokens that are never returned; they keep their share of the probability.
    """
    count = min(count, rows_per_prompt * logits.shape[-1])
    if _has_kernel(logits):
        tokens = torch.tensor(suppressed, dtype=torch.long)
        return torch.ops.monoblock.topk_continuations(
            logits.contiguous(), scores, tokens, rows_per_prompt=rows_per_prompt, count=count
        )
    totals = logits + (scores - logits.logsumexp(-1))[:, None]
    if suppressed:
        totals[:, torch.tensor(suppressed, device=logits.device)] = -math.inf
    return segmented_topk(totals.view(len(logits) // rows_per_prompt, -1), count)


def _has_kernel(logits: Tensor) -> bool:
    """Whether the CPU kernels are loaded and support these logits."""
    is_cpu_fp32 = logits.device.type == "cpu" and logits.dtype == torch.float32
    return is_cpu_fp32 and hasattr(torch.ops.monoblock, "topk_continuations")


def segmented_topk(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and indices (B, count) of topk; a CPU searches only the segments with the largest maxima."""
    size = _segment_size(rows.shape[-1]) if rows.device.type == "cpu" else 1
    if size < MIN_SEGMENT or rows.shape[-1] // size <= 2 * count:
        top = rows.topk(count)
        return top.values, top.indices
    segments = rows.unflatten(-1, (-1, size))
    selected = segments.amax(-1).topk(count).indices.sort(-1).values  # in order, so that the first of equals wins
    candidates = segments.gather(1, selected[..., None].expand(-1, -1, size)).flatten(1)
    top = candidates.topk(count)
    indices = selected.gather(1, top.indices // size) * size + top.indices % size
    return top.values, indices


def _segment_size(length: int) -> int:
    """Return the largest segment size, up to MAX_SEGMENT, that divides `length`."""
    return next(size for size in range(min(MAX_SEGMENT, length), 0, -1) if length % size == 0)
