"""Triton source of the kernel in gpu_attention.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import launch_next, store_quantized, wait_for_previous


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
def load_columns(keys, values, begin, end, keys_column, values_column, K: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """Load BLOCK keys and values (BLOCK, K) from column `begin` on; those from `end` on are 0."""
    column, index = begin + tl.arange(0, BLOCK)[:, None], tl.arange(0, K)[None, :]
    key = tl.load(keys + column * keys_column + index, mask=column < end, other=0.0)
    value = tl.load(values + column * values_column + index, mask=column < end, other=0.0)
    return key, value


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

    The program of a group that ends last combines the results of all splits, SPLITS at a time; `finished` counts the
    programs, and is 0 again afterwards. If SPLITS is 1, there is one split. The length and the first keys and values
    are loaded before the kernel waits: they were written in the step before.
    """
    launch_next(PDL)
    row, group, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    keys += row.to(tl.int64) * keys_row + group.to(tl.int64) * keys_head
    values += row.to(tl.int64) * values_row + group.to(tl.int64) * values_head
    index = tl.arange(0, K)
    length = tl.load(lengths + row, cache_modifier=".cg")
    begin, end = split_range(length, split, splits, BLOCK)
    key, value = load_columns(keys, values, begin, end, keys_column, values_column, K, BLOCK)
    wait_for_previous(PDL)
    head = tl.arange(0, PADDED_HEADS)
    head_mask = head < HEADS
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
    for start in range(begin, end, BLOCK):
        visible = start + tl.arange(0, BLOCK) < end
        next_key, next_value = load_columns(keys, values, start + BLOCK, end, keys_column, values_column, K, BLOCK)
        score = tl.where(visible[None, :], tl.dot(query, tl.trans(key)) * scale, -float("inf"))  # (PADDED_HEADS, BLOCK)
        new_max = tl.maximum(running_max, tl.max(score, 1))
        rescale = tl.exp(running_max - new_max)
        weights = tl.exp(score - new_max[:, None])
        total = total * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(dtype), value)
        running_max = new_max
        key, value = next_key, next_value

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
    """Combine the partial results of all splits of the cache for one head, SPLITS at a time; an empty split adds 0.

    With QUANTIZE, the result is also stored rounded to 8 bits, as a part of a vector of `size` elements. Other programs
    have written the partial results, so they are read from the cache that all share (".cg").
    """
    index = tl.arange(0, K)
    largest, total = -float("inf"), 0.0
    accumulator = tl.zeros((K,), tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        mask = split < splits
        partial = partials + (head * splits + split) * (K + 2)
        running_max = tl.load(partial + K, mask=mask, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(partial + K + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(partial[:, None] + index[None, :], mask=mask[:, None], other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(running_max, 0))  # finite: split 0 has the new token
        weight, rescale = tl.exp(running_max - new_largest), tl.exp(largest - new_largest)
        total = total * rescale + tl.sum(part_total * weight, 0)
        accumulator = accumulator * rescale + tl.sum(part * weight[:, None], 0)
        largest = new_largest
    y = (accumulator / total).to(out.dtype.element_ty)
    tl.store(out + head * K + index, y)
    if QUANTIZE:
        store_quantized(y.to(tl.float32), head * (K // 32), integers, scales, sums, size, K // 32)
