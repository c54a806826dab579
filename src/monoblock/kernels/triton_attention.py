"""Triton source of the kernels in gpu_attention.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import launch_next, store_quantized, wait_for_previous
from monoblock.kernels.triton_beams import add_keys, empty_sums

PAGE: tl.constexpr = tl.constexpr(16)  # tokens of a page


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
def load_queries(
    q, cos, sin, row, group, first, q_row, q_head, q_token, T,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr,
    ROTARY_LAYOUT: tl.constexpr, dtype: tl.constexpr,
) -> Any:  # fmt: skip
    """Load the queries of QUERIES tokens with HEADS heads and rotate them; also return the token of each.

    They are (ROWS, K), of which some are no queries: tensor cores multiply at least 16 rows.
    """
    place, index = tl.arange(0, ROWS), tl.arange(0, K)[None, :]
    head, token = place // QUERIES, first + place % QUERIES
    is_query = (head < HEADS) & (token < T)
    token = tl.where(is_query, token, 0)
    q_rows = row.to(tl.int64) * q_row + (group * HEADS + head).to(tl.int64) * q_head + token * q_token
    offsets, angles = index + tl.zeros((ROWS, 1), tl.int32), token[:, None] * PAIRS
    mask = is_query[:, None] & (offsets < K)
    query = rotate(q + q_rows[:, None], offsets, cos + angles, sin + angles, PAIRS, ROTARY_LAYOUT, mask)
    return query.to(dtype), token


@triton.jit
def load_pages(table, start, end, BLOCK: tl.constexpr) -> Any:
    """Return the page of each of BLOCK tokens of a row from `start` on, the first token of a page."""
    offset = tl.arange(0, BLOCK)
    return tl.load(table + start // PAGE + offset // PAGE, mask=start + offset < end, other=0)


@triton.jit
def load_tokens(keys, values, page, start, end, keys_page, values_page, K: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """Load the keys and values (BLOCK, K) of the tokens from `start` on, on their pages; those from `end` on are 0."""
    offset, index = tl.arange(0, BLOCK), tl.arange(0, K)[None, :]
    mask, slot, page = (start + offset < end)[:, None], offset % PAGE * K, page.to(tl.int64)
    key = tl.load(keys + (page * keys_page + slot)[:, None] + index, mask=mask, other=0.0)
    value = tl.load(values + (page * values_page + slot)[:, None] + index, mask=mask, other=0.0)
    return key, value


@triton.jit
def load_new(
    k, v, token, mask, k_token, v_token, cos, sin, K: tl.constexpr, PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:  # fmt: skip
    """Load the keys and values of the new tokens `token` of a row, and rotate the keys."""
    index, mask = tl.arange(0, K)[None, :], mask[:, None]
    offsets, angles = index + tl.zeros_like(token)[:, None], token[:, None] * PAIRS
    key = rotate(k + token[:, None] * k_token, offsets, cos + angles, sin + angles, PAIRS, ROTARY_LAYOUT, mask)
    return key.to(dtype), tl.load(v + token[:, None] * v_token + index, mask=mask, other=0.0)


@triton.jit
def store_tokens(key, value, keys, values, table, column, mask, keys_page, values_page, K: tl.constexpr) -> Any:
    """Store keys and values (NEW, K) as the tokens `column` of a row."""
    index, slot = tl.arange(0, K)[None, :], column % PAGE * K
    page = tl.load(table + column // PAGE, mask=mask, other=0).to(tl.int64)
    tl.store(keys + (page * keys_page + slot)[:, None] + index, key, mask=mask[:, None])
    tl.store(values + (page * values_page + slot)[:, None] + index, value, mask=mask[:, None])


@triton.jit
def add_part(attended, part) -> Any:
    """Add another part of the keys to the running softmax; both may be empty.  No compiler reorders these sums."""
    largest, total, accumulator = attended
    part_largest, part_total, part_sums = part
    new_largest = tl.maximum(largest, part_largest)
    offset = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    rescale, weight = tl.exp(largest - offset), tl.exp(part_largest - offset)
    total = tl.fma(total, rescale, part_total * weight)
    rescale, weight = rescale[:, None], weight[:, None]
    accumulator = tl.fma(accumulator, tl.broadcast_to(rescale, accumulator.shape), part_sums * weight)
    return new_largest, total, accumulator


@triton.jit
def attend_part(query, key, value, visible, scale, PART: tl.constexpr) -> Any:
    """Return the softmax sums of one part of the keys, as `add_keys` begins a running softmax.

    The instruction that multiplies adds up the weights as it does the values, so that the order of a sum does not
    depend on the rows of the tile and on the number of warps.
    """
    score = tl.where(visible, tl.dot(query, tl.trans(key)) * scale, -float("inf"))
    largest = tl.max(score, 1)
    offset = tl.where(largest == -float("inf"), 0.0, largest)  # of a query that sees no key
    weights = tl.exp(score - offset[:, None]).to(value.dtype)
    total = tl.max(tl.dot(weights, tl.full((PART, 16), 1.0, value.dtype)), 1)  # one of 16 equal columns
    return largest, total, tl.dot(weights, value)


@triton.jit
def store_part(attended, part, mask, K: tl.constexpr) -> Any:
    """Store the running softmax of each query, K + 2 numbers, from its pointer in `part` on."""
    largest, total, accumulator = attended
    tl.store(part[:, None] + tl.arange(0, K)[None, :], accumulator, mask=None if mask is None else mask[:, None])
    tl.store(part + K, largest, mask=mask)
    tl.store(part + K + 1, total, mask=mask)


@triton.jit
def store_attended(
    attended, out, row, group, first, T, G, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    K: tl.constexpr,
) -> Any:  # fmt: skip
    """Store the result of a tile of QUERIES tokens with HEADS heads; a query that sees nothing gets 0."""
    _, total, accumulator = attended
    place, index = tl.arange(0, ROWS), tl.arange(0, K)[None, :]
    head, token = place // QUERIES, first + place % QUERIES
    y = (accumulator / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    to = ((row.to(tl.int64) * T + token) * (G * HEADS) + group * HEADS + head)[:, None] * K + index
    tl.store(out + to, y, mask=((head < HEADS) & (token < T))[:, None])


@triton.jit
def attend_pages_kernel(
    q, k, v, keys, values, tables, lengths, counts, cos, sin, out, integers, scales, sums, partials, finished, scale,
    q_row, q_head, q_token, k_row, k_group, k_token, v_row, v_group, v_token,
    keys_page, keys_group, values_page, values_group, table_row, angles_row, T, G, splits, window,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    COMBINED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from QUERIES tokens of a row, with one group of HEADS heads, to one split of its pages.

    If NEW is not 0, up to NEW new tokens are given, which are not on the pages yet: split 0 attends to them, and writes
    them.  The program that ends last combines the results of all splits, SPLITS at a time; `finished` counts the
    programs, and is 0 again afterwards.  If SPLITS is 1, there is one split.  The table and the first keys and values
    are loaded before the kernel waits if they were written in the step before.
    """
    launch_next(PDL)
    row, group, split, tile = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1), tl.program_id(2)
    if CAUSAL and NEW == 0:
        wait_for_previous(PDL)
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    count = tl.load(counts + row, cache_modifier=".cg").to(tl.int32)
    first = tile * QUERIES
    stop = length
    if CAUSAL and NEW == 0:
        stop = length + tl.minimum(count, first + QUERIES)
    stop = tl.where(count > first, stop, 0)  # without a query, the program reads nothing
    begin = 0
    if WINDOW:
        begin = tl.maximum(length + first + 1 - window, 0) // PAGE * PAGE
    size = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), splits), PAGE) * PAGE
    begin += split * size
    end = tl.minimum(begin + size, stop)

    table = tables + row.to(tl.int64) * table_row
    keys += group * keys_group
    values += group * values_group
    page = load_pages(table, begin, end, BLOCK)
    key, value = load_tokens(keys, values, page, begin, end, keys_page, values_page, K, BLOCK)
    page = load_pages(table, begin + BLOCK, end, BLOCK)
    if NEW > 0 or not CAUSAL:
        wait_for_previous(PDL)

    cos += row.to(tl.int64) * angles_row
    sin += row.to(tl.int64) * angles_row
    query, token = load_queries(
        q, cos, sin, row, group, first, q_row, q_head, q_token, T, HEADS, QUERIES, ROWS, K, PAIRS, ROTARY_LAYOUT,
        out.dtype.element_ty,
    )  # fmt: skip

    attended = empty_sums(ROWS, K)
    if NEW > 0:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if split == 0:
            new = tl.arange(0, NEW)
            k += row.to(tl.int64) * k_row + group * k_group
            v += row.to(tl.int64) * v_row + group * v_group
            new_key, new_value = load_new(
                k, v, new, new < count, k_token, v_token, cos, sin, K, PAIRS, ROTARY_LAYOUT, out.dtype.element_ty
            )
            store_tokens(new_key, new_value, keys, values, table, length + new, new < count, keys_page, values_page, K)
            if QUERIES == 1:  # so is NEW
                largest, total, accumulator = attended
                score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
                total += tl.where(count > 0, 1.0, 0.0)
                attended = tl.where(count > 0, score, largest), total, accumulator + new_value.to(tl.float32)
            else:
                visible = (new < count)[None, :] & (new[None, :] <= token[:, None])
                if WINDOW:
                    visible = visible & (new[None, :] > (token - window)[:, None])
                attended = add_keys(query, new_key, new_value, visible, scale, attended, PRECISION)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        next_key, next_value = load_tokens(keys, values, page, start + BLOCK, end, keys_page, values_page, K, BLOCK)
        page = load_pages(table, start + 2 * BLOCK, end, BLOCK)
        visible = (column < end)[None, :]
        if CAUSAL and NEW == 0:
            visible = visible & (column[None, :] <= (length + token)[:, None])
        if WINDOW:
            visible = visible & (column[None, :] > (length + token - window)[:, None])
        attended = add_keys(query, key, value, visible, scale, attended, PRECISION)
        key, value = next_key, next_value

    if SPLITS == 1:
        store_attended(attended, out, row, group, first, T, G, HEADS, QUERIES, ROWS, K)
    else:
        program = tile * tl.num_programs(0) + tl.program_id(0)
        parts = partials + program.to(tl.int64) * (HEADS * QUERIES * splits * (K + 2))
        place = tl.arange(0, ROWS)
        store_part(attended, parts + (place * splits + split) * (K + 2), place < HEADS * QUERIES, K)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        if tl.atomic_add(finished + program, 1, sem="acq_rel") == splits - 1:
            tl.store(finished + program, 0)
            heads_out = out + (row.to(tl.int64) * T * G + group) * (HEADS * K)
            for one in range(0, HEADS * QUERIES, COMBINED):
                combine_pages(
                    parts, heads_out, integers, scales, sums, one, first, T, G, group, splits,
                    HEADS, QUERIES, COMBINED, SPLITS, K, QUANTIZE,
                )  # fmt: skip


@triton.jit
def combine_pages(
    parts, out, integers, scales, sums, start, first, T, G, group, splits,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, COMBINED: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> Any:  # fmt: skip
    """Combine the results of all splits for COMBINED queries, SPLITS at a time; a query that sees nothing gets 0.

    With QUANTIZE, the result is also stored rounded to 8 bits, as a part of a single vector. Other programs have
    written the results, so they are read from the cache that all share (".cg").
    """
    place, index = start + tl.arange(0, COMBINED), tl.arange(0, K)
    is_row = place < HEADS * QUERIES
    largest, total, accumulator = empty_sums(COMBINED, K)
    for first_split in range(0, splits, SPLITS):
        split = first_split + tl.arange(0, SPLITS)
        mask = is_row[:, None] & (split < splits)[None, :]
        part = parts + (place[:, None] * splits + split[None, :]) * (K + 2)
        part_largest = tl.load(part + K, mask=mask, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(part + K + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part_pointers = part[:, :, None] + index[None, None, :]
        sums_of_part = tl.load(part_pointers, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(part_largest, 1))
        offset = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weight, rescale = tl.exp(part_largest - offset[:, None]), tl.exp(largest - offset)
        total = total * rescale + tl.sum(part_total * weight, 1)
        accumulator = accumulator * rescale[:, None] + tl.sum(sums_of_part * weight[:, :, None], 1)
        largest = new_largest
    y = (accumulator / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    head, token = place // QUERIES, first + place % QUERIES
    to = (token * (G * HEADS) + head)[:, None] * K + index[None, :]
    tl.store(out + to, y, mask=(is_row & (token < T))[:, None])
    if QUANTIZE:
        block, limit = (group * HEADS + start) * (K // 32), (group + 1) * HEADS * K
        store_quantized(y.to(tl.float32), block, integers, scales, sums, limit, COMBINED * (K // 32))


@triton.jit
def write_pages_kernel(
    k, v, keys, values, tables, lengths, counts, cos, sin,
    k_row, k_group, k_token, v_row, v_group, v_token, keys_page, keys_group, values_page, values_group,
    table_row, angles_row, G,
    K: tl.constexpr, PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr, NEW: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program rotates NEW new keys of a row and group and writes them, and their values, to their pages."""
    launch_next(PDL)
    wait_for_previous(PDL)
    row, group = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    length = tl.load(lengths + row).to(tl.int32)
    token = tl.program_id(1) * NEW + tl.arange(0, NEW)
    mask = token < tl.load(counts + row).to(tl.int32)
    k += row * k_row + group * k_group
    v += row * v_row + group * v_group
    cos += row * angles_row
    sin += row * angles_row
    key, value = load_new(k, v, token, mask, k_token, v_token, cos, sin, K, PAIRS, ROTARY_LAYOUT, keys.dtype.element_ty)
    keys += group * keys_group
    values += group * values_group
    store_tokens(key, value, keys, values, tables + row * table_row, length + token, mask, keys_page, values_page, K)


@triton.jit
def attend_parts_kernel(
    q, k, v, keys, values, tables, lengths, counts, cos, sin, out, partials, finished, scale,
    q_row, q_head, q_token, k_row, k_group, k_token, v_row, v_group, v_token,
    keys_page, keys_group, values_page, values_group, table_row, angles_row, T, G, splits, window,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, ROTARY_LAYOUT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from QUERIES tokens of a row, with one group of HEADS heads, to the parts of its keys.

    A part has PART tokens, from a multiple of PART on.  With SPLIT each program has one part, and the program that ends
    last adds them up; else it has all parts and adds them up in the same way.  If NEW is 1, a row has a single new
    token, which is not on the pages yet: the program of its part writes it.  What is on the pages was then written in
    the step before, so the first part is loaded before the kernel waits.
    """
    launch_next(PDL)
    row, group, split, tile = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1), tl.program_id(2)
    if NEW == 0:
        wait_for_previous(PDL)
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    count = tl.load(counts + row, cache_modifier=".cg").to(tl.int32)
    first = tile * QUERIES
    stop = length + tl.minimum(count, first + QUERIES) if CAUSAL else length
    stop = tl.where(count > first, stop, 0)  # without a query, the program reads nothing
    low, high = 0, tl.cdiv(stop, PART)
    if WINDOW:
        low = tl.maximum(length + first + 1 - window, 0) // PART
    num_parts = high
    if SPLIT:
        low, high = tl.maximum(low, split), tl.minimum(high, split + 1)

    table = tables + row.to(tl.int64) * table_row
    keys += group * keys_group
    values += group * values_group
    end = tl.minimum(length if NEW == 1 else stop, high * PART)  # of what is read from the pages
    page = load_pages(table, low * PART, end, PART)
    key, value = load_tokens(keys, values, page, low * PART, end, keys_page, values_page, K, PART)
    if NEW == 1:
        wait_for_previous(PDL)
    cos += row.to(tl.int64) * angles_row
    sin += row.to(tl.int64) * angles_row
    query, token = load_queries(
        q, cos, sin, row, group, first, q_row, q_head, q_token, T, HEADS, QUERIES, ROWS, K, PAIRS, ROTARY_LAYOUT,
        out.dtype.element_ty,
    )  # fmt: skip
    if NEW == 1:
        new = tl.arange(0, 1)
        k += row.to(tl.int64) * k_row + group * k_group
        v += row.to(tl.int64) * v_row + group * v_group
        new_key, new_value = load_new(
            k, v, new, new < count, k_token, v_token, cos, sin, K, PAIRS, ROTARY_LAYOUT, out.dtype.element_ty
        )
        is_own = (new < count) & (length // PART >= low) & (length // PART < high)
        store_tokens(new_key, new_value, keys, values, table, length + new, is_own, keys_page, values_page, K)

    attended = empty_sums(ROWS, K)
    for part in range(low, high):
        column = part * PART + tl.arange(0, PART)
        if NEW == 1:
            key = tl.where((column == length)[:, None], new_key, key)
            value = tl.where((column == length)[:, None], new_value, value)
        visible = (column < stop)[None, :]
        if CAUSAL:
            visible = visible & (column[None, :] <= (length + token)[:, None])
        if WINDOW:
            visible = visible & (column[None, :] > (length + token - window)[:, None])
        attended = add_part(attended, attend_part(query, key, value, visible, scale, PART))
        if not SPLIT:
            page = load_pages(table, (part + 1) * PART, end, PART)
            key, value = load_tokens(keys, values, page, (part + 1) * PART, end, keys_page, values_page, K, PART)

    if SPLIT:
        program, place = tile * tl.num_programs(0) + tl.program_id(0), tl.arange(0, ROWS)
        parts = partials + program.to(tl.int64) * splits * ROWS * (K + 2)
        store_part(attended, parts + (split * ROWS + place) * (K + 2), None, K)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        if tl.atomic_add(finished + program, 1, sem="acq_rel") == splits - 1:
            tl.store(finished + program, 0)
            attended = empty_sums(ROWS, K)
            for one in range(0, num_parts):
                partial = parts + (one * ROWS + place) * (K + 2)
                part_sums = tl.load(partial[:, None] + tl.arange(0, K)[None, :], cache_modifier=".cg")
                largest = tl.load(partial + K, cache_modifier=".cg")
                total = tl.load(partial + K + 1, cache_modifier=".cg")
                attended = add_part(attended, (largest, total, part_sums))
            store_attended(attended, out, row, group, first, T, G, HEADS, QUERIES, ROWS, K)
    else:
        store_attended(attended, out, row, group, first, T, G, HEADS, QUERIES, ROWS, K)
