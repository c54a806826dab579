"""Triton kernels for attention over a key/value cache on a GPU, to which they add the new tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from monoblock.kernels.gpu import (
    QUANTIZED_BLOCK,
    TARGET_PROGRAMS,
    Activations,
    is_available,
    launch_options,
    quantized_arguments,
)

PAGE_SIZE = 16  # tokens
MAX_QUERIES = 64  # of a program that attends over pages: tokens times the heads that share a head of keys
MAX_NEW = 32  # new tokens that the kernel writes itself
EXACT_PART, EXACT_ROWS = 256, 64  # keys of a part, and rows of a tile, in exact mode
MAX_COMBINED = 8192  # numbers of partial results that a program combines at a time
ROTARY_LAYOUTS = {None: 0, "halves": 1, "interleaved": 2}
# Keys per block and warps, the fastest measured on an H200: of several programs for each head, and of one.
SPLIT_TILE, WHOLE_TILE = (64, 4), (32, 2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _triton_kernels() -> Any:
    from monoblock.kernels import triton_attention

    return triton_attention


def supports_pages(x: Tensor, size: int) -> bool:
    """Return whether there is a kernel for heads of `size` features, computed from x."""
    has_kernel = 16 <= size <= 256 and size & (size - 1) == 0
    return has_kernel and x.is_cuda and x.dtype in DTYPES and is_available()


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str | None = None,
    window: int | None = None,
    quantize: bool = False,
    finished: Tensor | None = None,
) -> Activations:
    """Rotate the queries and keys of new tokens, write the keys and values to their pages, and attend to all tokens.

    q (R, H, T, K), k and v (R, G, T, K) belong to the new tokens, of which `counts` (R,) are real; cos and sin (R or 1,
    1, T, pairs) are their angles.  keys and values (pages, G, 16, K) are the pages, of which row r has those in tables
    (R, P), and lengths (R,) counts the tokens on them before the new ones.  A token sees those of its row up to itself,
    the last `window` of them.  The output is (R, T, H K), the heads next to each other.  With `quantize`, the kernel
    also computes the 8-bit form of a single vector, if it can.

    `finished` are integers for the kernel (see `make_counters`); without them, it needs another launch.
    """
    H, T, G = q.shape[1], q.shape[2], keys.shape[1]
    is_one_tile = T == 1 or (T <= MAX_NEW and _power_of_two(T) * (H // G) <= MAX_QUERIES)
    angles = (None, None, None) if cos is None or sin is None else (cos, sin, layout)
    if not is_one_tile:
        _write_pages(k, v, keys, values, tables, lengths, counts, *angles)
    return _attend_pages(
        q, k, v, keys, values, tables, lengths, counts, *angles,
        scale=scale, new=T if is_one_tile else 0, causal=True, window=window, quantize=quantize, finished=finished,
    )  # fmt: skip


def attend_source_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float | None,
    quantize: bool = False,
    finished: Tensor | None = None,
) -> Activations:
    """Attend from the tokens q (R, H, T, K) of each row to all tokens of its source, of which there are `lengths`.

    The other arguments are those of `attend_pages`.  The output is 0 for a row without a source or a token.
    """
    return _attend_pages(
        q, q, q, keys, values, tables, lengths, counts, None, None, None,
        scale=scale, new=0, causal=False, window=None, quantize=quantize, finished=finished,
    )  # fmt: skip


def make_counters(count: int, device: torch.device) -> Tensor:
    """Return `finished` of `attend_pages` for up to `count` tiles of queries: rows times heads of keys times tiles.

    Each program of the kernel adds 1 to that of its tile, and the last one sets it back to 0.  All layers can use the
    same, but no kernels that run at the same time.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)


def _attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str | None,
    *,
    scale: float | None,
    new: int,
    causal: bool,
    window: int | None,
    quantize: bool,
    finished: Tensor | None,
) -> Activations:
    R, H, T, K = q.shape
    G, P = keys.shape[1], tables.shape[1]
    heads = H // G
    queries = min(_power_of_two(T), max(1, MAX_QUERIES // heads))  # few sizes, for each of which it is compiled
    tiles, rows = -(-T // queries), max(16, _power_of_two(heads * queries))
    splits = max(1, min(-(-P * PAGE_SIZE // 64), TARGET_PROGRAMS // (R * G * tiles)))
    block, warps = SPLIT_TILE if splits > 1 or rows > 16 else WHOLE_TILE
    block = max(16, block // (1 + (K > 128)) // (1 + (q.dtype == torch.float32)))
    out = torch.empty(R, T, H * K, dtype=q.dtype, device=q.device)
    quantized, rounded = quantized_arguments(out, quantize and splits > 1 and K % QUANTIZED_BLOCK == 0)
    parts = R * G * tiles * heads * queries * splits * (K + 2) if splits > 1 else 1
    partials = torch.empty(parts, dtype=torch.float32, device=q.device)
    if splits > 1 and (finished is None or finished.numel() < R * G * tiles):
        finished = torch.zeros(R * G * tiles, dtype=torch.int32, device=q.device)
    split_tile = min(16, _power_of_two(splits))
    _triton_kernels().attend_pages_kernel[(R * G, splits, tiles)](
        q, k, v, keys, values, tables, lengths, counts, q if cos is None else cos, q if sin is None else sin, out,
        *quantized, partials, partials if finished is None else finished, K**-0.5 if scale is None else scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *keys.stride()[:2], *values.stride()[:2], tables.stride(0),
        _row_stride(cos), T, G, splits, 0 if window is None else window,
        HEADS=heads, QUERIES=queries, ROWS=rows, NEW=new if new < 2 else max(16, _power_of_two(new)), K=K,
        PAIRS=1 if cos is None else cos.shape[-1], ROTARY_LAYOUT=ROTARY_LAYOUTS[layout], CAUSAL=causal,
        WINDOW=window is not None,
        SPLITS=split_tile, COMBINED=max(1, min(_power_of_two(heads * queries), MAX_COMBINED // (split_tile * K))),
        QUANTIZE=rounded is not None, BLOCK=block, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps if rows <= 32 else 8, **launch_options(),
    )  # fmt: skip
    return Activations(out, rounded)


def attend_pages_exactly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str | None = None,
    window: int | None = None,
) -> Activations:
    """Compute `attend_pages` so that the bits of a token do not depend on other rows, nor on what is new in its own.

    Keys are added up in parts that begin at multiples of EXACT_PART, and the parts in their order.
    """
    angles = (None, None, None) if cos is None or sin is None else (cos, sin, layout)
    _write_pages(k, v, keys, values, tables, lengths, counts, *angles)
    return _attend_parts(q, keys, values, tables, lengths, counts, *angles, scale=scale, causal=True, window=window)


def attend_source_pages_exactly(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, counts: Tensor, *, scale: float | None
) -> Activations:
    """Compute `attend_source_pages` so that the bits of a token do not depend on other rows or tokens."""
    return _attend_parts(
        q, keys, values, tables, lengths, counts, None, None, None, scale=scale, causal=False, window=None
    )


def _attend_parts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str | None,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Activations:
    R, H, T, K = q.shape
    G, heads = keys.shape[1], H // keys.shape[1]
    queries = max(1, EXACT_ROWS // _power_of_two(heads))
    rows, tiles = max(EXACT_ROWS, _power_of_two(heads)), -(-T // queries)
    parts, programs = -(-tables.shape[1] * PAGE_SIZE // EXACT_PART), R * G * tiles
    splits = parts if 2 * programs <= TARGET_PROGRAMS else 1
    out = torch.empty(R, T, H * K, dtype=q.dtype, device=q.device)
    partials = torch.empty(
        programs * splits * rows * (K + 2) if splits > 1 else 1, dtype=torch.float32, device=q.device
    )
    sizes = {"HEADS": heads, "QUERIES": queries, "ROWS": rows, "K": K, "num_warps": 4, **launch_options()}
    _triton_kernels().attend_parts_kernel[(R * G, splits, tiles)](
        q, keys, values, tables, lengths, counts, q if cos is None else cos, q if sin is None else sin, out, partials,
        K**-0.5 if scale is None else scale, *q.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
        tables.stride(0), _row_stride(cos), T, G, splits, 0 if window is None else window,
        PAIRS=1 if cos is None else cos.shape[-1], ROTARY_LAYOUT=ROTARY_LAYOUTS[layout], CAUSAL=causal,
        WINDOW=window is not None, SPLIT=splits > 1, PART=EXACT_PART, BLOCK=64 if K <= 128 else 32, **sizes,
    )  # fmt: skip
    if splits > 1:
        _triton_kernels().add_parts_kernel[(R * G, tiles)](partials, out, T, G, splits, **sizes)
    return Activations(out)


def _write_pages(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str | None,
) -> None:
    R, G, T, K = k.shape
    _triton_kernels().write_pages_kernel[(R * G, -(-T // PAGE_SIZE))](
        k, v, keys, values, tables, lengths, counts, k if cos is None else cos, k if sin is None else sin,
        *k.stride()[:3], *v.stride()[:3], *keys.stride()[:2], *values.stride()[:2], tables.stride(0), _row_stride(cos),
        G, K=K, PAIRS=1 if cos is None else cos.shape[-1], ROTARY_LAYOUT=ROTARY_LAYOUTS[layout], NEW=PAGE_SIZE,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def _row_stride(angles: Tensor | None) -> int:
    return 0 if angles is None or angles.shape[0] == 1 else angles.stride(0)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
