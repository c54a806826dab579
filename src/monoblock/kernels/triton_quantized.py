"""Triton source of the kernels in gpu_quantized.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import activate, gate_up_product, launch_next, store_quantized, wait_for_previous

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
def load_blocks(weight, index, row_mask, num_blocks) -> Any:
    """Load blocks of 16 bytes of some rows as (rows, blocks, 4) words; `weight` (rows, 1, 1) points to the rows."""
    mask = row_mask[:, None, None] & (index < num_blocks)[None, :, None]
    offsets = (index[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, :]
    return tl.load(weight + offsets, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_vector(x, x_scales, x_sums, index, num_blocks, BITS: tl.constexpr) -> Any:
    """Load the part of a quantized vector that is multiplied by blocks of 16 bytes: 16 or 32 elements.

    The elements are words (blocks, 4); with 4 bits there are two of them: for the lower halves of bytes, and the upper.
    """
    inside = index < num_blocks
    words = x.to(tl.pointer_type(tl.int32)) + index[:, None] * (32 // BITS) + tl.arange(0, 4)[None, :]
    low = tl.load(words, mask=inside[:, None], other=0)
    high, total = low, 0.0
    if BITS == 4:
        high = tl.load(words + 4, mask=inside[:, None], other=0)
        total = tl.load(x_sums + index, mask=inside, other=0.0)
    scale = tl.load(x_scales + (index // 2 if BITS == 8 else index), mask=inside, other=0.0)
    return low, high, scale, total


@triton.jit
def multiply_blocks(
    w, low, high, x_scale, x_sum, scales, index, row_mask, num_blocks, GROUP: tl.constexpr, BITS: tl.constexpr
) -> Any:
    """Multiply blocks of rows (rows, blocks, 4) by their part of the vector; return the products (rows, blocks)."""
    zero = tl.zeros(w.shape, tl.int32)
    mask = row_mask[:, None] & (index < num_blocks)[None, :]
    scale = tl.load(scales + (index * (128 // BITS) // GROUP)[None, :], mask=mask, other=0)
    if BITS == 8:
        dot = tl.sum(dot4(w, tl.broadcast_to(low[None, :, :], w.shape), zero), 2)
        products = dot.to(tl.float32) * (scale.to(tl.float32) * x_scale[None, :])
    else:
        dot = dot4(w & LOW_NIBBLES, tl.broadcast_to(low[None, :, :], w.shape), zero)
        dot = tl.sum(dot4((w >> 4) & LOW_NIBBLES, tl.broadcast_to(high[None, :, :], w.shape), dot), 2)
        minimum = (scale & -65536).to(tl.float32, bitcast=True)
        scale = (scale << 16).to(tl.float32, bitcast=True)
        products = dot.to(tl.float32) * (scale * x_scale[None, :]) + minimum * x_sum[None, :]
    return products


@triton.jit
def quantized_matvec_kernel(
    x, x_scales, x_sums, weight, scales, bias, residual, out, N, K, GROUP: tl.constexpr, BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of a quantized weight with x, BLOCKS blocks of 16 bytes at a time.

    With 4 bits, a word of `scales` has the scale of a group in its lower half and the minimum in its upper half.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    block, num_blocks = tl.arange(0, BLOCKS), K * BITS // 128
    weight = weight.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None, None] * (num_blocks * 4)
    scales += rows[:, None] * (K // GROUP)
    w = load_blocks(weight, block, row_mask, num_blocks)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, BLOCKS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        index = first + block
        low, high, x_scale, x_sum = load_vector(x, x_scales, x_sums, index, num_blocks, BITS)
        next_w = load_blocks(weight, index + BLOCKS, row_mask, num_blocks)  # loaded while these are multiplied
        total += multiply_blocks(w, low, high, x_scale, x_sum, scales, index, row_mask, num_blocks, GROUP, BITS)
        w = next_w
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
    if HAS_RESIDUAL:
        y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded, as a product and an addition would be
        y += tl.load(residual + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def quantized_gated_kernel(
    x, x_scales, x_sums, weight, scales, out, integers, out_scales, out_sums, F, K,
    GROUP: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program computes 32 elements of activation(gate) * up and also stores them rounded to 8 bits.

    The quantized weight (2F, K) has the rows of gate, then those of up; 32 divides F.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * 32 + tl.arange(0, 32)
    row_mask = rows < F
    block, num_blocks = tl.arange(0, BLOCKS), K * BITS // 128
    weight = weight.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None, None] * (num_blocks * 4)
    weight_up = weight + tl.cast(F, tl.int64) * (num_blocks * 4)
    scales += rows[:, None] * (K // GROUP)
    scales_up = scales + F * (K // GROUP)
    w = load_blocks(weight, block, row_mask, num_blocks)
    w_up = load_blocks(weight_up, block, row_mask, num_blocks)
    wait_for_previous(PDL)
    gate, up = tl.zeros((32, BLOCKS), tl.float32), tl.zeros((32, BLOCKS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        index = first + block
        low, high, x_scale, x_sum = load_vector(x, x_scales, x_sums, index, num_blocks, BITS)
        next_w = load_blocks(weight, index + BLOCKS, row_mask, num_blocks)
        next_up = load_blocks(weight_up, index + BLOCKS, row_mask, num_blocks)
        gate += multiply_blocks(w, low, high, x_scale, x_sum, scales, index, row_mask, num_blocks, GROUP, BITS)
        up += multiply_blocks(w_up, low, high, x_scale, x_sum, scales_up, index, row_mask, num_blocks, GROUP, BITS)
        w, w_up = next_w, next_up
    y = gate_up_product(tl.sum(gate, 1), tl.sum(up, 1), ACTIVATION, out.dtype.element_ty)
    tl.store(out + rows, y, mask=row_mask)
    store_quantized(y.to(tl.float32), tl.program_id(0), integers, out_scales, out_sums, F, 1)
