"""Triton kernels for attention over a key/value cache on a GPU, to which they add the new tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoblock.kernels.gpu import (
    QUANTIZED_BLOCK,
    TARGET_PROGRAMS,
    Activations,
    has_kernels,
    launch_options,
    next_power_of_two,
    quantized_arguments,
    triton_kernels,
)

PAGE_SIZE = 16  # tokens
MAX_QUERIES = 64  # of a program: tokens, or beams, times the heads that share a head of keys
MAX_NEW = 32  # new tokens that the kernel writes itself
EXACT_PART, EXACT_ROWS = 128, 64  # keys of a part at most, and rows of a tile, in exact mode
MAX_COMBINED = 8192  # numbers of partial results that a program combines at a time
ROTARY_LAYOUTS = {None: 0, "halves": 1, "interleaved": 2}
# Keys per block and warps, the fastest measured on an H200: of several programs for each head, and of one.
SPLIT_TILE, WHOLE_TILE = (64, 4), (32, 2)


def is_head_size(size: int) -> bool:
    return size in (16, 32, 64, 128, 256)


def supports_pages(x: Tensor, size: int) -> bool:
    """Return whether there is a kernel for heads of `size` features, computed from x."""
    return is_head_size(size) and has_kernels(x)


def attend_pages(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
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
    exact: bool = False,
) -> Activations:
    """Rotate the queries and keys of new tokens, write the keys and values to their pages, and attend to all tokens.

    q (R, H, T, K), k and v (R, G, T, K) belong to the new tokens, of which `counts` (R,) are real; cos and sin (R or 1,
    1, T, pairs) are their angles.  keys and values (pages, G, 16, K) are the pages, of which row r has those in tables
    (R, P), and lengths (R,) counts the tokens on them before the new ones.  A token sees those of its row up to itself,
    the last `window` of them.  The output is (R, T, H K), the heads next to each other.

    quantize: the kernel also computes the 8-bit form of a single vector, if it can.
    finished: integers for the kernel (see `make_counters`); without them, they are made for the call.
    exact: the bits of a token do not depend on other rows, nor on what is new in its own: keys are added up in parts
        of EXACT_PART or less for wide heads, and the parts in their order.
    """
    (R, H, T, K), (_, G, _, _), P = q.shape, keys.shape, tables.shape[1]
    heads, kernels = H // G, triton_kernels("triton_attention")
    pages, angles = (keys, values, tables, lengths, counts), (q if cos is None else cos, q if sin is None else sin)
    angles_row = 0 if cos is None or cos.shape[0] == 1 else cos.stride(0)
    strides = (*keys.stride()[:2], *values.stride()[:2], tables.stride(0), angles_row)
    options = {"K": K, "PAIRS": 1 if cos is None else cos.shape[-1], "ROTARY_LAYOUT": ROTARY_LAYOUTS[layout]}
    options |= launch_options()
    fits = T <= MAX_NEW and next_power_of_two(T) * heads <= MAX_QUERIES
    new = T if T == 1 or (fits and not exact) else 0  # tokens that are not on the pages yet
    if k is not None and v is not None and not new:
        kernels.write_pages_kernel[(R * G, -(-T // PAGE_SIZE))](
            k, v, *pages, *angles, *k.stride()[:3], *v.stride()[:3], *strides, G,
            NEW=PAGE_SIZE, num_warps=4, **options,
        )  # fmt: skip
    options |= {"CAUSAL": k is not None, "WINDOW": window is not None}
    if k is None or v is None:
        k, v, new = q, q, 0
    if exact:
        queries = 1 if T == 1 else max(1, EXACT_ROWS // next_power_of_two(heads))
    else:  # few sizes, for each of which it is compiled
        queries = min(next_power_of_two(T), max(1, MAX_QUERIES // heads))
    rows, tiles = max(16, next_power_of_two(heads * queries)), -(-T // queries)
    programs, part = R * G * tiles, min(EXACT_PART, 8192 // K)
    if exact:
        splits = -(-P * PAGE_SIZE // part) if 2 * programs <= TARGET_PROGRAMS else 1
    else:
        splits = max(1, min(-(-P * PAGE_SIZE // 64), TARGET_PROGRAMS // programs))
    out = torch.empty(R, T, H * K, dtype=q.dtype, device=q.device)
    size = programs * splits * (rows if exact else heads * queries) * (K + 2)
    partials = torch.empty(size if splits > 1 else 1, dtype=torch.float32, device=q.device)
    if splits == 1:
        finished = partials  # there is nothing to count
    elif finished is None or finished.numel() < programs:
        finished = make_counters(programs, q.device)
    numbers = (K**-0.5 if scale is None else scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides)
    numbers = (*numbers, T, G, splits, 0 if window is None else window)
    grid, sizes = (R * G, splits, tiles), {"HEADS": heads, "QUERIES": queries, "ROWS": rows}
    if exact:
        kernels.attend_parts_kernel[grid](
            q, k, v, *pages, *angles, out, partials, finished, *numbers,
            **sizes, NEW=new, SPLIT=splits > 1, PART=part, num_warps=4, num_stages=2, **options,
        )  # fmt: skip
        return Activations(out)
    block, warps = SPLIT_TILE if splits > 1 or rows > 16 else WHOLE_TILE
    split_tile, is_fp32 = min(16, next_power_of_two(splits)), q.dtype == torch.float32
    quantized, rounded = quantized_arguments(out, quantize and splits > 1 and K % QUANTIZED_BLOCK == 0)
    kernels.attend_pages_kernel[grid](
        q, k, v, *pages, *angles, out, *quantized, partials, finished, *numbers,
        **sizes, NEW=new if new < 2 else max(16, next_power_of_two(new)), SPLITS=split_tile,
        COMBINED=max(1, min(next_power_of_two(heads * queries), MAX_COMBINED // (split_tile * K))),
        QUANTIZE=rounded is not None, BLOCK=max(16, block // (1 + (K > 128)) // (1 + is_fp32)),
        PRECISION="ieee" if is_fp32 else "tf32", num_warps=warps if rows <= 32 else 8, **options,
    )  # fmt: skip
    return Activations(out, rounded)


def attend_source_pages(q: Tensor, *pages: Tensor, scale: float | None, **options: Any) -> Activations:
    """Attend from the tokens q (R, H, T, K) of each row to all tokens of its source, of which there are `lengths`.

    The other arguments are those of `attend_pages`.  The output is 0 for a row without a source or a token.
    """
    return attend_pages(q, None, None, *pages, scale=scale, **options)


def make_counters(count: int, device: torch.device) -> Tensor:
    """Return `finished` of `attend_pages` for up to `count` tiles of queries: rows times heads of keys times tiles.

    Each program of the kernel adds 1 to that of its tile, and the last one sets it back to 0.  All layers can use the
    same, but no kernels that run at the same time.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
