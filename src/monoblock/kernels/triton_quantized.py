"""Triton source of the kernels in gpu_quantized.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import activate, launch_next, store_quantized, wait_for_previous

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
def dot4(a, b, total) -> Any:
    """Add to `total` the dot product of the four signed bytes in each word of a and b."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def store_rows(
    y, rows, row_mask, bias, residual, out, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr
) -> Any:
    """Add bias, activation and residual to y, rounding after each of them, and store it."""
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
    if HAS_RESIDUAL:
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y += tl.load(residual + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def int8_matvec_kernel(
    x, x_scales, x_sums, weight, scales, bias, residual, out, N, K, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of an 8-bit weight with x, BLOCKS blocks of 16 weights at a time."""
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    block, word = tl.arange(0, BLOCKS), tl.arange(0, 4)  # a block has four words of four weights
    num_blocks = K // 16
    x_words = x.to(tl.pointer_type(tl.int32))
    start = weight.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None, None] * (K // 4)
    scales += rows[:, None] * (K // GROUP)
    zero = tl.zeros((ROWS, BLOCKS, 4), tl.int32)
    offsets = (block[:, None] * 4 + word[None, :])[None, :, :]
    mask = row_mask[:, None, None] & (block < num_blocks)[None, :, None]
    w = tl.load(start + offsets, mask=mask, other=0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        index = first + block
        inside = index < num_blocks
        x_block = tl.load(x_words + index[:, None] * 4 + word[None, :], mask=inside[:, None], other=0)
        x_scale = tl.load(x_scales + index // 2, mask=inside, other=0.0)
        scale = tl.load(scales + (index * 16 // GROUP)[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0)
        dot = tl.sum(dot4(w, tl.broadcast_to(x_block[None, :, :], (ROWS, BLOCKS, 4)), zero), 2)
        index += BLOCKS  # the next weights are loaded while these are multiplied
        mask = row_mask[:, None, None] & (index < num_blocks)[None, :, None]
        offsets = (index[:, None] * 4 + word[None, :])[None, :, :]
        w = tl.load(start + offsets, mask=mask, other=0, eviction_policy="evict_first")
        total += dot.to(tl.float32) * (scale.to(tl.float32) * x_scale[None, :])
    store_rows(tl.sum(total, 1), rows, row_mask, bias, residual, out, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def int4_matvec_kernel(
    x, x_scales, x_sums, weight, scales_and_minima, bias, residual, out, N, K, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of a 4-bit weight with x, BLOCKS blocks of 32 weights at a time.

    A word of `scales_and_minima` has the scale of a group in its lower half and the minimum in its upper half.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    block, word = tl.arange(0, BLOCKS), tl.arange(0, 4)  # a block has four words of eight weights
    num_blocks = K // 32
    x_words = x.to(tl.pointer_type(tl.int32))
    start = weight.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None, None] * (K // 8)
    scales_and_minima += rows[:, None] * (K // GROUP)
    zero = tl.zeros((ROWS, BLOCKS, 4), tl.int32)
    offsets = (block[:, None] * 4 + word[None, :])[None, :, :]
    mask = row_mask[:, None, None] & (block < num_blocks)[None, :, None]
    w = tl.load(start + offsets, mask=mask, other=0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        index = first + block
        inside = index < num_blocks
        x_offsets = x_words + index[:, None] * 8 + word[None, :]
        x_low = tl.load(x_offsets, mask=inside[:, None], other=0)
        x_high = tl.load(x_offsets + 4, mask=inside[:, None], other=0)
        x_scale = tl.load(x_scales + index, mask=inside, other=0.0)
        x_sum = tl.load(x_sums + index, mask=inside, other=0.0)
        group_mask = row_mask[:, None] & inside[None, :]
        pair = tl.load(scales_and_minima + (index * 32 // GROUP)[None, :], mask=group_mask, other=0)
        scale = (pair << 16).to(tl.float32, bitcast=True)
        minimum = (pair & -65536).to(tl.float32, bitcast=True)
        dot = dot4(w & LOW_NIBBLES, tl.broadcast_to(x_low[None, :, :], (ROWS, BLOCKS, 4)), zero)
        dot = dot4((w >> 4) & LOW_NIBBLES, tl.broadcast_to(x_high[None, :, :], (ROWS, BLOCKS, 4)), dot)
        index += BLOCKS  # the next weights are loaded while these are multiplied
        mask = row_mask[:, None, None] & (index < num_blocks)[None, :, None]
        offsets = (index[:, None] * 4 + word[None, :])[None, :, :]
        w = tl.load(start + offsets, mask=mask, other=0, eviction_policy="evict_first")
        total += tl.sum(dot, 2).to(tl.float32) * (scale * x_scale[None, :]) + minimum * x_sum[None, :]
    store_rows(tl.sum(total, 1), rows, row_mask, bias, residual, out, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
