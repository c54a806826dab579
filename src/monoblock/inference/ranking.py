"""Find each prompt's best continuations among all tokens of all its beams, without a softmax over the vocabulary.

Since log p = logit - log Σ exp(logit), the logits rank the tokens within a row, and one logsumexp per row makes the
rows comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SEGMENT = 128  # number of values in a segment, of which only the maximum is compared at first
MIN_SEGMENT = 16  # if segments would be shorter, a plain topk is faster


def top_continuations(
    logits: Tensor, scores: Tensor, suppressed: Sequence[int], rows_per_prompt: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` best ways to extend one of a prompt's beams by one token, for each prompt.

    logits: (prompts · rows_per_prompt, V), one row for each beam.
    scores: (prompts · rows_per_prompt,), the sum of log-probabilities of each beam so far.
    suppressed: tokens that are never returned; the probabilities of the other tokens do not change.
    Return the new sums of log-probabilities (prompts, count) and the indices beam · V + token (prompts, count).
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
    """Return whether the compiled CPU kernel is loaded and supports these logits: fp32, on a CPU."""
    is_cpu_fp32 = logits.device.type == "cpu" and logits.dtype == torch.float32
    return is_cpu_fp32 and hasattr(torch.ops.monoblock, "topk_continuations")


def segmented_topk(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and indices (B, count) of `rows.topk(count)`.

    On a CPU the rows are divided into segments, and only the `count` segments with the largest maxima are searched.
    """
    size = _segment_size(rows.shape[-1]) if rows.device.type == "cpu" else 1
    if size < MIN_SEGMENT or rows.shape[-1] // size <= 2 * count:
        top = rows.topk(count)
        return top.values, top.indices
    segments = rows.unflatten(-1, (-1, size))
    selected = segments.amax(-1).topk(count).indices.sort(-1).values  # sorted: of equal values, the first wins
    candidates = segments.gather(1, selected[..., None].expand(-1, -1, size)).flatten(1)
    top = candidates.topk(count)
    indices = selected.gather(1, top.indices // size) * size + top.indices % size
    return top.values, indices


def _segment_size(length: int) -> int:
    """Return the largest segment size, up to MAX_SEGMENT, that divides `length`."""
    return next(size for size in range(min(MAX_SEGMENT, length), 0, -1) if length % size == 0)
