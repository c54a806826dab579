"""Triton kernels for a step of a beam search on a GPU: attention of the beams, and the best of their logits.

`attend_beams` and `attend_source` read every key and value once for all beams of a search, whose queries are the rows
of one tile, and need no matrix of what each beam sees (see nn/beam_cache.py). `best_tokens` reads the
logits once, where a softmax and the search for the best tokens would read and write them several times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoblock.kernels.gpu import has_kernels, launch_options, next_power_of_two, triton_kernels
from monoblock.kernels.gpu_attention import MAX_QUERIES, is_head_size

COLUMNS = 64  # keys that a program reads at a time
SEGMENT = 128  # logits of which only the maximum is compared at first
SEGMENTS = 16  # segments that a program reads at a time
MAX_SEGMENTS, MAX_COUNT = 16_384, 64  # of one search in `best_tokens`


def supports_beams(x: Tensor, size: int, queries: int) -> bool:
    """Return whether there are kernels for attention of x with heads of `size` features and this many queries."""
    return is_head_size(size) and queries <= MAX_QUERIES and has_kernels(x)


def attend_beams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    writers: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
) -> Tensor:
    """Append one token of each beam to the cache, and attend from it to the tokens of its hypothesis.

    q (S, H, n, K), k and v (S, G, n, K) belong to the new tokens of the n beams of S searches. keys and values (S, G,
    slots, K) are the cache: the token that beam b wrote at position p is in slot p · n + b. writers (S, n, positions)
    is the beam that wrote the token of each hypothesis at each position, n or more if there is none, and lengths (S,)
    counts the positions before the new one. The output is (S, n, H K), the heads next to each other.
    """
    (S, H, n, K), G = q.shape, keys.shape[1]
    out = torch.empty(S, n, H * K, dtype=q.dtype, device=q.device)
    triton_kernels("triton_beams").attend_beams_kernel[(S * G,)](
        q, k, v, keys, values, writers, lengths, out, K**-0.5 if scale is None else scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        *writers.stride()[:2], G, n,
        HEADS=H // G, ROWS=_pad(H // G * n), NEW=_pad(n), K=K, **_tile(q),
    )  # fmt: skip
    return out


def attend_source(q: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, *, scale: float | None) -> Tensor:
    """Attend from a few queries of each row to all its keys, or to those that are valid.

    q (B, H, T, K), keys and values (B, G, columns, K), valid (B, columns). The output is (B, T, H K), and 0 for a row
    without a valid key.
    """
    (B, H, T, K), G = q.shape, keys.shape[1]
    out = torch.empty(B, T, H * K, dtype=q.dtype, device=q.device)
    valid_row = 0 if valid is None or valid.shape[0] == 1 else valid.stride(0)
    triton_kernels("triton_beams").attend_source_kernel[(B * G,)](
        q, keys, values, q if valid is None else valid, out, K**-0.5 if scale is None else scale,
        *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], valid_row, G, T, keys.shape[2],
        HEADS=H // G, ROWS=_pad(H // G * T), K=K, HAS_VALID=valid is not None, **_tile(q),
    )  # fmt: skip
    return out


def _pad(count: int) -> int:
    """Return the next power of two: tensor cores multiply at least 16 rows."""
    return max(16, next_power_of_two(count))


def _tile(q: Tensor) -> dict[str, Any]:
    """Return how many keys are read at a time, and how products are rounded: those of fp32 are not."""
    is_fp32, size = q.dtype == torch.float32, q.shape[-1]
    columns = max(16, COLUMNS * 64 // max(size, 64) // (2 if is_fp32 else 1))
    return {"BLOCK": columns, "PRECISION": "ieee" if is_fp32 else "tf32", "num_warps": 4, **launch_options()}


def supports_best_tokens(logits: Tensor, count: int) -> bool:
    """Return whether there are kernels for the `count` best of these logits (searches, beams, V)."""
    is_dense = logits.stride(-1) == 1 and logits.stride(0) == logits.stride(1) * logits.shape[1]
    segments = logits.shape[1] * -(-logits.shape[2] // SEGMENT)
    return 2 * count <= segments <= MAX_SEGMENTS and count <= MAX_COUNT and is_dense and has_kernels(logits)


def best_tokens(logits: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best continuations of each search by one token, best first: scores (fp64), beams and tokens.

    logits: (searches, beams, V).
    scores: (searches, beams) in fp64, the sum of log-probabilities of each beam so far.
    A continuation has the score of its beam plus the log-probability of its token, computed in fp32. The logits are
    read once; then only those SEGMENT successive logits are searched whose maxima are among the best.
    """
    S, n, V = logits.shape
    segments, device = -(-V // SEGMENT), logits.device
    maxima = torch.empty(S, n, segments, dtype=torch.float32, device=device)
    log_sums = torch.empty(S, n, dtype=torch.float32, device=device)
    found = torch.empty(S, count, dtype=torch.double, device=device)
    beams, tokens = (torch.empty(S, count, dtype=torch.long, device=device) for _ in range(2))
    kernels, options = triton_kernels("triton_beams"), launch_options()
    kernels.segment_maxima_kernel[(S * n,)](
        logits, maxima, log_sums, logits.stride(1), V, segments, SIZE=SEGMENT, BLOCK=SEGMENTS, num_warps=4, **options
    )
    kernels.best_tokens_kernel[(S,)](
        logits, maxima, log_sums, scores.contiguous(), found, beams, tokens, logits.stride(1), V, segments, n, count,
        SEGMENTS=next_power_of_two(n * segments), COUNT=next_power_of_two(count), SIZE=SEGMENT,
        num_warps=4 if n * segments <= 2048 else 8, **options,
    )  # fmt: skip
    return found, beams, tokens
