"""Triton source of the kernels in gpu.py; imported only if Triton is installed and there is a GPU.

With PDL (programmatic dependent launch, from compute capability 9.0 on) the next kernel starts while this one still
runs, and loads weights, which do not depend on it; `wait_for_previous` then waits until all kernels before it have
ended.  Kernels start before they wait, so several can run ahead: what a kernel loads before it waits must not be
written by any of these kernels in the same step (weights, or the cache of the steps before).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Blocks without larger numbers are rounded to 0, since 127 / 1e-37 is infinite.
SMALLEST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def launch_next(PDL: tl.constexpr) -> Any:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> Any:
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers) -> Any:
    """Bring the cache lines at these pointers to the L2 cache; nothing waits for them."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr) -> Any:
    """Apply an activation, given by its code in gpu.py; -1 is none."""
    if ACTIVATION == 0:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2 * inner)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def gate_up_product(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr) -> Any:
    """Compute activation(gate) * up, rounding gate, up and the activation as separate kernels would."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    return (gate * up).to(dtype)


@triton.jit
def store_rows(
    y, bias, residual, out, rows, row_mask, offsets, mask,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
) -> Any:  # fmt: skip
    """Add bias, activation and residual to y, rounding after each as separate kernels would; store and return it.

    `rows` of the weight belong to the last axis of y, and `offsets` are those of y in `residual` and `out`.
    """
    if HAS_BIAS:
        y += tl.load(bias + rows, mask=row_mask, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
    if HAS_RESIDUAL:
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + offsets, y, mask=mask)
    return y


@triton.jit
def matvec_kernel(
    x, weight, bias, residual, out, N, K,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of the weight with x, COLUMNS at a time, accumulating in fp32.

    If GATED, the weight (2 N, K) has the rows of gate, then those of up, and the output is activation(gate) * up.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    columns = tl.arange(0, COLUMNS)
    start = weight + rows.to(tl.int64)[:, None] * K
    up_start = weight + (rows.to(tl.int64) + N)[:, None] * K
    mask = row_mask[:, None] & (columns < K)[None, :]
    w = tl.load(start + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        w_up = tl.load(up_start + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    total, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        index = first + columns
        x_block = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)[None, :]
        total += w.to(tl.float32) * x_block
        if GATED:
            up += w_up.to(tl.float32) * x_block
        index += COLUMNS  # the weights of the next block are loaded while this one is multiplied
        mask = row_mask[:, None] & (index < K)[None, :]
        w = tl.load(start + index[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            w_up = tl.load(up_start + index[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        y = gate_up_product(tl.sum(total, 1), tl.sum(up, 1), ACTIVATION, out.dtype.element_ty)
        tl.store(out + rows, y, mask=row_mask)
    else:
        y = tl.sum(total, 1)
        store_rows(y, bias, residual, out, rows, row_mask, rows, row_mask, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def matmul_kernel(
    x, weight, bias, residual, out, M, N, K,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies BLOCK_M rows of x with BLOCK_N rows of the weight; BLOCK_K divides K.

    With PREFETCH, for which BLOCK_K is a multiple of 64, the weight is on its way before the kernel waits.
    """
    launch_next(PDL)
    first_n, first_m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    n, m, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n_mask, m_mask = n < N - first_n, m < M - first_m
    weight += first_n.to(tl.int64) * K
    x += first_m.to(tl.int64) * K
    first = first_m.to(tl.int64) * N + first_n
    if PREFETCH:
        line = weight + tl.minimum(n, N - first_n - 1)[:, None] * K + tl.arange(0, BLOCK_K // 64)[None, :] * 64
        for start in range(0, K, BLOCK_K):
            prefetch(line + start)
    wait_for_previous(PDL)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_block = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=m_mask[:, None], other=0.0)
        w = tl.load(weight + n[None, :] * K + (start + k)[:, None], mask=n_mask[None, :], other=0.0)
        y = tl.dot(x_block, w, y)
    offsets, mask = first + m[:, None] * N + n[None, :], m_mask[:, None] & n_mask[None, :]
    store_rows(y, bias + first_n, residual, out, n, n_mask, offsets, mask, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def store_quantized(values, first_block, integers, scales, sums, K, BLOCKS: tl.constexpr) -> Any:
    """Round 32 · BLOCKS values of a vector to 8 bits; each block of 32 has a scale, and its sum is stored too."""
    values = tl.reshape(values, (BLOCKS, 32))
    block = first_block + tl.arange(0, BLOCKS)
    largest = tl.max(tl.abs(values), 1)
    scale = tl.where(largest > SMALLEST, largest / 127.0, 0.0)
    inverse = tl.where(largest > SMALLEST, 127.0 / largest, 0.0)
    rounded = tl.extra.cuda.libdevice.rint(values * inverse[:, None])
    offsets = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(integers + offsets, rounded.to(tl.int8), mask=offsets < K)
    tl.store(scales + block, scale, mask=block * 32 < K)
    tl.store(sums + block, scale * tl.sum(rounded, 1), mask=block * 32 < K)


@triton.jit
def norm_kernel(
    x, weight, bias, out, integers, scales, sums, K, eps,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CAST_AFTER_SCALE: tl.constexpr,
    QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program normalizes one vector; with QUANTIZE, it also stores it rounded to 8 bits."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64) * K
    index = tl.arange(0, BLOCK)
    mask = index < K
    if HAS_WEIGHT:
        scale = tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    wide = tl.load(x + row + index, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / K, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    if HAS_WEIGHT:
        if CAST_AFTER_SCALE:
            wide = wide * scale
        else:
            wide = wide.to(out.dtype.element_ty).to(tl.float32) * scale.to(out.dtype.element_ty).to(tl.float32)
    if HAS_BIAS:
        wide += tl.load(bias + index, mask=mask, other=0.0).to(tl.float32)
    result = wide.to(out.dtype.element_ty)
    tl.store(out + row + index, result, mask=mask)
    if QUANTIZE:
        store_quantized(tl.where(mask, result.to(tl.float32), 0.0), 0, integers, scales, sums, K, BLOCK // 32)


@triton.jit
def gated_activation_kernel(
    x, out, integers, scales, sums, F,
    ACTIVATION: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Compute activation(gate) * up, rounding the activation before the product as two separate kernels would.

    With QUANTIZE, the single vector is also stored rounded to 8 bits.
    """
    launch_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < F
    gate = tl.load(x + row * 2 * F + index, mask=mask, other=0.0)
    up = tl.load(x + row * 2 * F + F + index, mask=mask, other=0.0)
    result = gate_up_product(gate, up, ACTIVATION, out.dtype.element_ty)
    tl.store(out + row * F + index, result, mask=mask)
    if QUANTIZE:
        values, first = tl.where(mask, result.to(tl.float32), 0.0), tl.program_id(1) * (BLOCK // 32)
        store_quantized(values, first, integers, scales, sums, F, BLOCK // 32)


@triton.jit
def argmax_kernel(x, out, V, x_row, BLOCK: tl.constexpr, PDL: tl.constexpr) -> Any:
    """Each program finds the first of the largest elements of one row."""
    launch_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    best, place = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        value = tl.load(x + row.to(tl.int64) * x_row + start + index, mask=start + index < V, other=-float("inf"))
        is_better = value > best
        best, place = tl.where(is_better, value.to(tl.float32), best), tl.where(is_better, start + index, place)
    first = tl.min(tl.where(best == tl.max(best, 0), place, V - 1), 0)
    tl.store(out + row, first.to(tl.int64))
