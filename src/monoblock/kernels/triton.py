"""Triton source of the kernels in gpu.py; imported only if Triton is installed and there is a GPU.

With PDL (programmatic dependent launch, from compute capability 9.0 on) the next kernel starts while this one still
runs, and loads what does not depend on it; `wait_for_previous` then waits until all kernels before have ended.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def launch_next(PDL: tl.constexpr) -> Any:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> Any:
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, mask) -> Any:
    """Ask for the cache lines at some addresses, so that a later load finds them in the L2 cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [pointers, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
def matvec_kernel(
    x, weight, bias, residual, out, N, K,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies ROWS rows of the weight with x, COLUMNS at a time, accumulating in fp32."""
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    columns = tl.arange(0, COLUMNS)
    start = weight + rows.to(tl.int64)[:, None] * K
    mask = row_mask[:, None] & (columns < K)[None, :]
    w = tl.load(start + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        index = first + columns
        x_block = tl.load(x + index, mask=index < K, other=0.0)
        total += w.to(tl.float32) * x_block.to(tl.float32)[None, :]
        index += COLUMNS  # the weights of the next block are loaded while this one is multiplied
        mask = row_mask[:, None] & (index < K)[None, :]
        w = tl.load(start + index[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
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
def gated_matvec_kernel(
    x, weight, out, F, K, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
) -> Any:
    """Each program computes ROWS elements of activation(gate) * up; a weight (2F, K) has the rows of gate, then of up.

    Gate, up and the activation are rounded as by separate kernels.
    """
    launch_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < F
    columns = tl.arange(0, COLUMNS)
    start = weight + rows.to(tl.int64)[:, None] * K
    up_start = weight + (rows.to(tl.int64) + F)[:, None] * K
    mask = row_mask[:, None] & (columns < K)[None, :]
    w = tl.load(start + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    w_up = tl.load(up_start + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        index = first + columns
        x_block = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)[None, :]
        gate += w.to(tl.float32) * x_block
        up += w_up.to(tl.float32) * x_block
        index += COLUMNS  # the weights of the next block are loaded while this one is multiplied
        mask = row_mask[:, None] & (index < K)[None, :]
        w = tl.load(start + index[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        w_up = tl.load(up_start + index[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    y = gate_up_product(tl.sum(gate, 1), tl.sum(up, 1), ACTIVATION, out.dtype.element_ty)
    tl.store(out + rows, y, mask=row_mask)


@triton.jit
def matmul_kernel(
    x, weight, bias, residual, out, M, N, K,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program multiplies BLOCK_N rows of the weight with BLOCK_M rows of x; BLOCK_K divides K."""
    launch_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_mask, m_mask = n < N, m < M
    if PDL:
        if tl.program_id(1) == 0:  # the others need the same weights
            for start in range(0, K, 256):
                lines = start + 64 * tl.arange(0, 4)  # of 128 bytes
                prefetch(weight + n[:, None] * K + lines[None, :], n_mask[:, None] & (lines < K)[None, :])
    wait_for_previous(PDL)
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        w = tl.load(weight + n[:, None] * K + (start + k)[None, :], mask=n_mask[:, None], other=0.0)
        x_block = tl.load(x + m[None, :] * K + (start + k)[:, None], mask=m_mask[None, :], other=0.0)
        y = tl.dot(w, x_block, y)
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION >= 0:
        y = activate(y.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
    offsets = m[None, :] * N + n[:, None]
    mask = n_mask[:, None] & m_mask[None, :]
    if HAS_RESIDUAL:
        y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded, as a product and an addition would be
        y += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_quantized(values, first_block, integers, scales, sums, K, BLOCKS: tl.constexpr) -> Any:
    """Round 32 · BLOCKS values of a vector to 8 bits; each block of 32 has a scale, and its sum is stored too."""
    values = tl.reshape(values, (BLOCKS, 32))
    block = first_block + tl.arange(0, BLOCKS)
    largest = tl.max(tl.abs(values), 1)
    scale = largest / 127.0
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
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
def rotate(pointer, offsets, cos, sin, PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr, mask) -> Any:
    """Load the features `offsets` of a head and rotate them; features after the first 2 * PAIRS are not rotated."""
    x = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    if ROTARY_LAYOUT == 0:
        return x
    if ROTARY_LAYOUT == 1:
        partner = tl.where(offsets < PAIRS, offsets + PAIRS, offsets - PAIRS)
        pair = offsets % PAIRS
        sign = tl.where(offsets < PAIRS, -1.0, 1.0)
    else:
        partner = offsets ^ 1
        pair = offsets // 2
        sign = tl.where(offsets % 2 == 0, -1.0, 1.0)
    inside = (offsets < 2 * PAIRS) & mask
    other = tl.load(pointer + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)
    return x * c + sign * other * s


@triton.jit
def split_range(length, split, splits, BLOCK: tl.constexpr) -> Any:
    """Return the first column of a split of a cache, and that after its last one."""
    size = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    return split * size, tl.minimum((split + 1) * size, length)


@triton.jit
def attend_kernel(
    q, k, v, keys, values, lengths, cos, sin, out, integers, scales, sums, partials, finished, scale,
    q_row, q_head, k_row, k_head, v_row, v_head,
    keys_row, keys_head, keys_column, values_row, values_head, values_column,
    cos_row, H, G, splits,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr,
    SPLITS: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from one group of query heads to one split of a row's cache; split 0 adds the new token.

    The program of a group that ends last combines the results of all splits; `finished` counts them, and is 0 again
    afterwards. SPLITS is `splits`, rounded up to a power of two.
    """
    launch_next(PDL)
    row, group, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    keys += row.to(tl.int64) * keys_row + group * keys_head
    values += row.to(tl.int64) * values_row + group * values_head
    if PDL:
        begin, end = split_range(tl.load(lengths + row), split, splits, BLOCK)
        column = begin + tl.arange(0, BLOCK)
        for line in range(0, K, 64):  # of 128 bytes
            prefetch(keys + column * keys_column + line, column < end)
            prefetch(values + column * values_column + line, column < end)
    wait_for_previous(PDL)
    index = tl.arange(0, K)
    head = tl.arange(0, PADDED_HEADS)
    head_mask = head < HEADS
    length = tl.load(lengths + row)
    cos += row * cos_row
    sin += row * cos_row
    dtype = out.dtype.element_ty
    first_head = group * HEADS
    heads = (first_head + head)[:, None] * q_head + tl.zeros((1, K), tl.int32)
    offsets = tl.zeros((PADDED_HEADS, 1), tl.int32) + index[None, :]
    query = rotate(q + row * q_row + heads, offsets, cos, sin, PAIRS, ROTARY_LAYOUT, head_mask[:, None] & (offsets < K))
    query = query.to(dtype)  # (PADDED_HEADS, K): tensor cores multiply at least 16 rows

    running_max = tl.full((PADDED_HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED_HEADS,), tl.float32)
    accumulator = tl.zeros((PADDED_HEADS, K), tl.float32)
    if split == 0:
        new_key = rotate(k + row * k_row + group * k_head, index, cos, sin, PAIRS, ROTARY_LAYOUT, index < K).to(dtype)
        new_value = tl.load(v + row * v_row + group * v_head + index)
        tl.store(keys + length * keys_column + index, new_key)
        tl.store(values + length * values_column + index, new_value)
        running_max = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        accumulator += new_value.to(tl.float32)[None, :]
    begin, end = split_range(length, split, splits, BLOCK)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        visible = column < end
        key = tl.load(keys + column[:, None] * keys_column + index[None, :], mask=visible[:, None], other=0.0)
        value = tl.load(values + column[:, None] * values_column + index[None, :], mask=visible[:, None], other=0.0)
        score = tl.where(visible[None, :], tl.dot(query, tl.trans(key)) * scale, -float("inf"))  # (PADDED_HEADS, BLOCK)
        new_max = tl.maximum(running_max, tl.max(score, 1))
        rescale = tl.exp(running_max - new_max)
        weights = tl.exp(score - new_max[:, None])
        total = total * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(dtype), value)
        running_max = new_max

    out_row = row * H + first_head
    if SPLITS == 1:
        result = (accumulator / total[:, None]).to(dtype)
        tl.store(out + (out_row + head)[:, None] * K + index[None, :], result, mask=head_mask[:, None])
    else:
        partial = partials + ((out_row + head) * splits + split) * (K + 2)
        tl.store(partial[:, None] + index[None, :], accumulator, mask=head_mask[:, None])
        tl.store(partial + K, running_max, mask=head_mask)
        tl.store(partial + K + 1, total, mask=head_mask)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        if tl.atomic_add(finished + tl.program_id(0), 1, sem="acq_rel") == splits - 1:
            tl.store(finished + tl.program_id(0), 0)
            for one in range(HEADS):
                combine_splits(partials, out, integers, scales, sums, out_row + one, splits, SPLITS, K, QUANTIZE, H * K)


@triton.jit
def combine_splits(
    partials, out, integers, scales, sums, head, splits, SPLITS: tl.constexpr, K: tl.constexpr, QUANTIZE: tl.constexpr,
    size,
) -> Any:  # fmt: skip
    """Combine the partial results of all splits of the cache for one head; an empty split adds 0.

    With QUANTIZE, the result is also stored rounded to 8 bits, as a part of a vector of `size` elements. Other programs
    have written the partial results, so they are read from the cache that all share (".cg").
    """
    index, split = tl.arange(0, K), tl.arange(0, SPLITS)
    mask = split < splits
    partial = partials + (head * splits + split) * (K + 2)
    running_max = tl.load(partial + K, mask=mask, other=-float("inf"), cache_modifier=".cg")
    weight = tl.exp(running_max - tl.max(running_max, 0))
    total = tl.sum(tl.load(partial + K + 1, mask=mask, other=0.0, cache_modifier=".cg") * weight, 0)
    accumulator = tl.load(partial[:, None] + index[None, :], mask=mask[:, None], other=0.0, cache_modifier=".cg")
    y = (tl.sum(accumulator * weight[:, None], 0) / total).to(out.dtype.element_ty)
    tl.store(out + head * K + index, y)
    if QUANTIZE:
        store_quantized(y.to(tl.float32), head * (K // 32), integers, scales, sums, size, K // 32)
