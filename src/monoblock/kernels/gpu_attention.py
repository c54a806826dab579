"""A Triton kernel for decoding one token on a GPU: attention over a cache, to which it adds the new token."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from monoblock.kernels.gpu import QUANTIZED_BLOCK, TARGET_PROGRAMS, Activations, launch_options, quantized_arguments

ROTARY_LAYOUTS = {None: 0, "halves": 1, "interleaved": 2}
# Keys per block and warps, the fastest measured on an H200: of several programs for each head, and of one.
SPLIT_TILE, WHOLE_TILE = (64, 4), (32, 2)


@functools.cache
def _triton_kernels() -> Any:
    from monoblock.kernels import triton_attention

    return triton_attention


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str | None = None,
    quantize: bool = False,
) -> Activations:
    """Rotate the query and key of one new token per row, append it to the cache, and attend to all cached tokens.

    q (B, H, 1, K), k and v (B, G, 1, K) belong to the new token; keys and values (B, G, columns, K) are the cache,
    whose last column is not used, and lengths (B,) counts the tokens in it before the new one.  The output is
    (B, 1, H K), the heads next to each other.  With `quantize`, the kernel also computes the 8-bit form of a single
    vector, if it can.
    """
    B, H, _, K = q.shape
    G, columns = keys.shape[1], keys.shape[2]
    splits = max(1, min(-(-(columns - 1) // 64), TARGET_PROGRAMS // (B * G)))
    out = torch.empty(B, 1, H * K, dtype=q.dtype, device=q.device)
    can_quantize = splits > 1 and K % QUANTIZED_BLOCK == 0
    quantized, rounded = quantized_arguments(out, quantize and can_quantize)
    partials = torch.empty(B * H * splits * (K + 2) if splits > 1 else 1, dtype=torch.float32, device=q.device)
    rotary_layout = ROTARY_LAYOUTS[layout] if cos is not None else 0
    pairs = cos.shape[-1] if cos is not None else 1
    cos_rows = cos.shape[0] if cos is not None else 1
    heads = H // G
    block, warps = SPLIT_TILE if splits > 1 else WHOLE_TILE
    padded_heads = max(16, 1 << (heads - 1).bit_length())
    _triton_kernels().attend_kernel[(B * G, splits)](
        q, k, v, keys, values, lengths, cos if cos is not None else q, sin if sin is not None else q, out,
        *quantized, partials, _counters(keys) if splits > 1 else partials,
        K**-0.5 if scale is None else scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        pairs if cos_rows > 1 else 0, H, G, splits,
        HEADS=heads, PADDED_HEADS=padded_heads, K=K, PAIRS=pairs, ROTARY_LAYOUT=rotary_layout,
        SPLITS=min(16, 1 << (splits - 1).bit_length()), QUANTIZE=rounded is not None,
        BLOCK=block if K <= 128 else block // 2, num_warps=warps, **launch_options(),
    )  # fmt: skip
    return Activations(out, rounded)


def _counters(keys: Tensor) -> Tensor:
    """Return an integer for each row and head of the keys, initially 0.

    Each program of the kernel adds 1 to that of its row and head, and the last one sets it back to 0.  The counters
    belong to the cache that the kernel writes, so that no other kernel uses them at the same time.  They must exist
    before a call is recorded as a CUDA graph.
    """
    counters = getattr(keys, "_counters", None)
    if counters is None:
        counters = torch.zeros(keys.shape[0] * keys.shape[1], dtype=torch.int32, device=keys.device)
        keys._counters = counters  # type: ignore[attr-defined]
    return counters
