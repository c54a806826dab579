"""Triton source of the kernels in gpu_beams.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import launch_next, wait_for_previous


@triton.jit
def load_tile(pointer, rows, row_stride, mask, K: tl.constexpr) -> Any:
    """Load vectors of K features, one for each of `rows`; those that the mask leaves out are 0."""
    return tl.load(pointer + rows[:, None] * row_stride + tl.arange(0, K)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def tile_of_queries(G, queries, HEADS: tl.constexpr, ROWS: tl.constexpr) -> Any:
    """Return row and head of keys of this program and, for each row of its tile, if it is a query, which, and its head.

    The tile has all queries of the first of HEADS heads, then those of the next.
    """
    row, group = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    index = tl.arange(0, ROWS)
    is_query = index < HEADS * queries
    return row, group, is_query, tl.where(is_query, index % queries, 0), group * HEADS + index // queries


@triton.jit
def empty_sums(ROWS: tl.constexpr, K: tl.constexpr) -> Any:
    """Return the running softmax of ROWS queries without a key: largest score, sum, and weighted sum of values."""
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    return largest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, K), tl.float32)


@triton.jit
def add_keys(query, key, value, visible, scale, attended, PRECISION: tl.constexpr) -> Any:
    """Add the keys and values of one block to the running softmax of all queries (ROWS, K)."""
    largest, total, accumulator = attended
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    score = tl.where(visible, score, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))
    offset = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # of a query that has not seen a key yet
    rescale, weights = tl.exp(largest - offset), tl.exp(score - offset[:, None])
    total = total * rescale + tl.sum(weights, 1)
    product = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return new_largest, total, accumulator * rescale[:, None] + product


@triton.jit
def attend_beams_kernel(
    q, k, v, keys, values, writers, lengths, out, scale,
    q_row, q_head, q_beam, k_row, k_head, k_beam, v_row, v_head, v_beam,
    keys_row, keys_head, keys_column, values_row, values_head, values_column, writers_row, writers_beam,
    G, beams,
    HEADS: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from all beams of a search, with the heads that share its head of keys, to all their tokens.

    The queries are the rows of one tile for the tensor cores: of each of the HEADS heads, all beams. The program first
    adds the new tokens, each of which is seen by its own beam only.
    """
    launch_next(PDL)
    row, group, is_query, beam, head = tile_of_queries(G, beams, HEADS, ROWS)
    wait_for_previous(PDL)
    keys += row * keys_row + group * keys_head
    values += row * values_row + group * values_head
    length = tl.load(lengths + row)
    q_rows = tl.where(is_query, head * q_head + beam * q_beam, 0)
    query = load_tile(q + row * q_row, q_rows, 1, is_query, K)

    new = tl.arange(0, NEW)
    is_new, features = new < beams, tl.arange(0, K)[None, :]
    new_key = load_tile(k + row * k_row + group * k_head, new, k_beam, is_new, K)
    new_value = load_tile(v + row * v_row + group * v_head, new, v_beam, is_new, K)
    slots = (length * beams + new)[:, None]
    tl.store(keys + slots * keys_column + features, new_key, mask=is_new[:, None])
    tl.store(values + slots * values_column + features, new_value, mask=is_new[:, None])
    own = beam[:, None] == new[None, :]
    attended = add_keys(query, new_key, new_value, own, scale, empty_sums(ROWS, K), PRECISION)

    writers += row * writers_row + beam[:, None] * writers_beam
    for start in range(0, length * beams, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_old = slot < length * beams
        key = load_tile(keys, slot, keys_column, is_old, K)
        value = load_tile(values, slot, values_column, is_old, K)
        writer = tl.load(writers + (slot // beams)[None, :], mask=is_old[None, :], other=255)
        visible = writer.to(tl.int32) == (slot % beams).to(tl.int32)[None, :]
        attended = add_keys(query, key, value, visible, scale, attended, PRECISION)
    _, total, accumulator = attended
    result = (accumulator / total[:, None]).to(out.dtype.element_ty)
    to = ((row * beams + beam) * (G * HEADS) + head)[:, None] * K + features
    tl.store(out + to, result, mask=is_query[:, None])


@triton.jit
def attend_source_kernel(
    q, keys, values, valid, out, scale,
    q_row, q_head, q_query, keys_row, keys_head, keys_column, values_row, values_head, values_column, valid_row,
    G, queries, columns,
    HEADS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from all queries of a row, with the heads that share its head of keys, to all valid columns.

    A query without a valid column gets 0.
    """
    launch_next(PDL)
    row, group, is_query, number, head = tile_of_queries(G, queries, HEADS, ROWS)
    wait_for_previous(PDL)
    keys += row * keys_row + group * keys_head
    values += row * values_row + group * values_head
    q_rows = tl.where(is_query, head * q_head + number * q_query, 0)
    query = load_tile(q + row * q_row, q_rows, 1, is_query, K)
    attended = empty_sums(ROWS, K)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        visible = column < columns
        if HAS_VALID:
            visible &= tl.load(valid + row * valid_row + column, mask=visible, other=0) != 0
        key = load_tile(keys, column, keys_column, visible, K)
        value = load_tile(values, column, values_column, visible, K)
        attended = add_keys(query, key, value, visible[None, :], scale, attended, PRECISION)
    _, total, accumulator = attended
    result = (accumulator / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    to = ((row * queries + number) * (G * HEADS) + head)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out + to, result, mask=is_query[:, None])


@triton.jit
def segment_maxima_kernel(
    logits, maxima, log_sums, row_stride, V, segments, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> Any:
    """Each program reads one row of logits: the maximum of every segment of SIZE values, and log Σ exp(logit)."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    logits += row * row_stride
    maxima += row * segments
    column = tl.arange(0, SIZE)[None, :]
    largest, total = -float("inf"), 0.0
    for first in range(0, segments, BLOCK):
        segment = first + tl.arange(0, BLOCK)
        token = segment[:, None] * SIZE + column
        x = tl.load(logits + token, mask=token < V, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 1)
        tl.store(maxima + segment, top, mask=segment < segments)
        new_largest = tl.maximum(largest, tl.max(top, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.sum(tl.exp(x - new_largest), 1), 0)
        largest = new_largest
    tl.store(log_sums + row, largest + tl.log(total))


@triton.jit
def best_tokens_kernel(
    logits, maxima, log_sums, scores, best_scores, best_beams, best_tokens,
    beam_stride, V, segments, beams, count,
    SEGMENTS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program finds the `count` best continuations of one search: first the best segments, then the best in them.

    Of equal sums the first wins. A sum that is not a number counts as the largest, so that it is not overlooked.
    """
    launch_next(PDL)
    search = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    logits += search * beams * beam_stride
    maxima += search * beams * segments
    log_sums += search * beams
    scores += search * beams
    place = tl.arange(0, SEGMENTS)
    inside = place < beams * segments
    beam = place // segments
    score = tl.load(scores + beam, mask=inside, other=0.0).to(tl.float32)
    sums = tl.load(maxima + place, mask=inside, other=0.0) + score
    sums -= tl.load(log_sums + beam, mask=inside, other=0.0)
    sums = tl.where(inside, tl.where(sums != sums, float("inf"), sums), -float("inf"))
    order = tl.arange(0, COUNT)
    chosen = tl.zeros((COUNT,), tl.int32)
    for number in range(count):
        first = tl.argmax(sums, 0)
        chosen = tl.where(order == number, first, chosen)
        sums = tl.where(place == first, -float("inf"), sums)

    beam = chosen // segments
    token = (chosen % segments)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (order < count)[:, None] & (token < V)
    added = tl.load(scores + beam).to(tl.float32) - tl.load(log_sums + beam)
    x = tl.load(logits + beam[:, None] * beam_stride + token, mask=inside, other=0.0).to(tl.float32) + added[:, None]
    x = tl.where(inside, tl.where(x != x, float("inf"), x), -float("inf"))
    index = beam[:, None] * V + token
    for number in range(count):
        largest = tl.max(tl.max(x, 1), 0)
        found = tl.min(tl.min(tl.where((x == largest) & inside, index, 2147483647), 1), 0)
        to = search * count + number
        tl.store(best_scores + to, tl.where(largest == float("inf"), float("nan"), largest).to(tl.float64))
        tl.store(best_beams + to, (found // V).to(tl.int64))
        tl.store(best_tokens + to, (found % V).to(tl.int64))
        x = tl.where(index == found, -float("inf"), x)
