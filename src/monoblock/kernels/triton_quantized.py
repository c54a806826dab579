"""Triton source of the kernels in gpu_quantized.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import launch_next, store_quantized, store_rows, wait_for_previous

LOW_NIBBLES: tl.constexpr = tl.constexpr(0x0F0F0F0F)


@triton.jit
def quantize_kernel(x, integers, scales, sums, K, BLOCKS: tl.constexpr, PDL: tl.constexpr) -> Any:
    """Each program quantizes BLOCKS blocks of 32 elements of x."""
    launch_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0) * 32 * BLOCKS + tl.arange(0, 32 * BLOCKS)
    values = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)
    store_quantized(values, tl.program_id(0) * BLOCKS, integers, scales, sums, K, BLOCKS)


@triton.jit
def dequantize_kernel(weight, scales, out, K, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """Each program dequantizes BLOCK weights of a row."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < K
    scale = tl.load(scales + row * (K // GROUP) + index // GROUP, mask=mask, other=0)
    if BITS == 8:
        value = tl.load(weight + row * K + index, mask=mask, other=0).to(tl.float32) * scale.to(tl.float32)
    else:
        byte = tl.load(weight + row * (K // 2) + index // 32 * 16 + index % 16, mask=mask, other=0).to(tl.int32)
        level = tl.where(index % 32 < 16, byte & 15, byte >> 4).to(tl.float32)
        minimum = (scale & -65536).to(tl.float32, bitcast=True)
        value = level * (scale << 16).to(tl.float32, bitcast=True) + minimum
    tl.store(out + row * K + index, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_dot4(a, b, total) -> Any:
    """Add to `total` the dot product of the four signed bytes in each word of a and b."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )


# A row is read in blocks of 16 bytes: four words with 16 or 32 weights. Tiles are (words, rows) or (blocks, rows), and
# a warp reads 32 blocks of a row: Triton then chooses layouts with which the loops below need no barrier and no
# shuffle. EVEN is whether a row consists of whole tiles, so that its loads need no masks.


@triton.jit
def load_words(weight, first, num_blocks, BLOCKS: tl.constexpr, EVEN: tl.constexpr) -> Any:
    """Load the words of BLOCKS blocks, the first of which may be after the end; `weight` (1, rows) points to rows."""
    word = first * 4 + tl.arange(0, BLOCKS * 4)[:, None]
    mask = first < num_blocks if EVEN else word < num_blocks * 4
    return tl.load(weight + word, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_scales(
    scales, first, num_blocks, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr
) -> Any:
    """Load the scales of BLOCKS blocks, which are all before the end if EVEN; `scales` (1, rows) points to rows."""
    block = first + tl.arange(0, BLOCKS)[:, None]
    mask = None if EVEN else block < num_blocks
    return tl.load(scales + block * (128 // BITS) // GROUP, mask=mask, other=None if EVEN else 0)


@triton.jit
def load_vector(
    x, x_scales, x_sums, first, num_blocks, BITS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr
) -> Any:
    """Load the part of a quantized vector that is multiplied by BLOCKS blocks: words, scales and sums.

    With 4 bits there are two words for each word of weights: for the lower halves of its bytes, and for the upper.
    """
    word, block = first * 4 + tl.arange(0, BLOCKS * 4)[:, None], first + tl.arange(0, BLOCKS)[:, None]
    words = x.to(tl.pointer_type(tl.int32)) + (word if BITS == 8 else word // 4 * 8 + word % 4)
    word_mask, mask = None if EVEN else word < num_blocks * 4, None if EVEN else block < num_blocks
    low = tl.load(words, mask=word_mask)  # anything after the end, where all weights are 0
    scale = tl.load(x_scales + (block // 2 if BITS == 8 else block), mask=mask, other=None if EVEN else 0.0)
    high, total = low, scale
    if BITS == 4:
        high = tl.load(words + 4, mask=word_mask)
        total = tl.load(x_sums + block, mask=mask, other=None if EVEN else 0.0)
    return low, high, scale, total


@triton.jit
def multiply_words(w, scale, low, high, x_scale, x_sum, BITS: tl.constexpr, BLOCKS: tl.constexpr) -> Any:
    """Multiply words of weights by their part of the vector; return the products (BLOCKS, rows)."""
    zero = tl.zeros_like(w)
    if BITS == 8:
        dot = add_dot4(w, tl.broadcast_to(low, w.shape), zero)
    else:
        dot = add_dot4(w & LOW_NIBBLES, tl.broadcast_to(low, w.shape), zero)
        dot = add_dot4((w >> 4) & LOW_NIBBLES, tl.broadcast_to(high, w.shape), dot)
    dot = tl.sum(tl.reshape(dot, (BLOCKS, 4, w.shape[1])), 1).to(tl.float32)
    if BITS == 8:
        products = dot * (scale.to(tl.float32) * x_scale)
    else:
        minimum = (scale & -65536).to(tl.float32, bitcast=True)
        products = dot * ((scale << 16).to(tl.float32, bitcast=True) * x_scale) + minimum * x_sum
    return products


@triton.jit
def quantized_matvec_kernel(
    x, x_scales, x_sums, x_squares, weight, scales, bias, residual, out,
    norm_weight, norm_integers, norm_scales, norm_sums, norm_squares, N, K, eps,
    GROUP: tl.constexpr, BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, SQUARES: tl.constexpr, HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of a quantized weight with x; AHEAD tiles (1 or 2) are loaded in advance.

    With 4 bits, a word of `scales` has the scale of a group in its lower half and the minimum in its upper half.

    With HAS_NORM, ROWS is 32, and the output is the input of an RMS norm: it is also stored multiplied by the weight of
    the norm and rounded to 8 bits, with the sum of squares of each block of 32. If SQUARES is not 0, x was stored in
    this way, and the result is multiplied by the factor of the norm; SQUARES is the number of blocks of x, or more.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask, num_blocks = rows < N, K * BITS // 128
    row = tl.minimum(rows, N - 1).to(tl.int64)[None, :]  # rows after the last are computed, but not stored
    weight = weight.to(tl.pointer_type(tl.int32)) + row * (num_blocks * 4)
    scales += row * (K // GROUP)
    w = load_words(weight, 0, num_blocks, BLOCKS, EVEN)
    next_w = load_words(weight, BLOCKS, num_blocks, BLOCKS, EVEN) if AHEAD == 2 else w
    if HAS_NORM:
        next_scale = load_scales(scales, 0, num_blocks, GROUP, BITS, BLOCKS, EVEN=False)
    norm_scale = tl.load(norm_weight + rows).to(tl.float32) if HAS_NORM else 1.0
    wait_for_previous(PDL)
    if SQUARES > 0:
        block = tl.arange(0, SQUARES)
        square = tl.sum(tl.load(x_squares + block, mask=block * 32 < K, other=0.0), 0)
        factor = tl.rsqrt(square / K + eps)
    total = tl.zeros((BLOCKS, ROWS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        last_w = load_words(weight, first + AHEAD * BLOCKS, num_blocks, BLOCKS, EVEN)  # while others are multiplied
        low, high, x_scale, x_sum = load_vector(x, x_scales, x_sums, first, num_blocks, BITS, BLOCKS, EVEN)
        if HAS_NORM:
            scale = next_scale
            next_scale = load_scales(scales, first + BLOCKS, num_blocks, GROUP, BITS, BLOCKS, EVEN=False)
        else:
            scale = load_scales(scales, first, num_blocks, GROUP, BITS, BLOCKS, EVEN)
        total += multiply_words(w, scale, low, high, x_scale, x_sum, BITS, BLOCKS)
        w = next_w if AHEAD == 2 else last_w
        next_w = last_w
    y = tl.sum(total, 0)
    if SQUARES > 0:
        y *= factor
    y = store_rows(y, bias, residual, out, rows, row_mask, rows, row_mask, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    if HAS_NORM:
        y = y.to(tl.float32)
        tl.store(norm_squares + tl.program_id(0), tl.sum(y * y, 0))
        store_quantized(y * norm_scale, tl.program_id(0), norm_integers, norm_scales, norm_sums, N, 1)
