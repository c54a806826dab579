"""Triton source of the kernels in gpu_beams.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from monoblock.kernels.triton import launch_next, wait_for_previous


@triton.jit
def attend_beams_kernel(
    q, k, v, keys, values, writers, lengths, out, scale,
    q_row, q_head, q_beam, k_row, k_head, k_beam, v_row, v_head, v_beam,
    keys_row, keys_head, keys_column, values_row, values_head, values_column, writers_row, writers_beam,
    H, beams,
    HEADS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from one head of one beam to the tokens of its hypothesis, and adds the new token.

    HEADS query heads share a head of keys, to which the first of them adds the token. Only this beam sees the new token
    in this step, so no program reads what another one writes.
    """
    launch_next(PDL)
    beam, head = tl.program_id(0) % beams, tl.program_id(0) // beams % H
    row = (tl.program_id(0) // (beams * H)).to(tl.int64)
    group = head // HEADS
    index = tl.arange(0, K)
    wait_for_previous(PDL)
    keys += row * keys_row + group * keys_head
    values += row * values_row + group * values_head
    writers += row * writers_row + beam * writers_beam
    length = tl.load(lengths + row)
    query = tl.load(q + row * q_row + head * q_head + beam * q_beam + index).to(tl.float32) * scale
    new_key = tl.load(k + row * k_row + group * k_head + beam * k_beam + index)
    new_value = tl.load(v + row * v_row + group * v_head + beam * v_beam + index)
    if head % HEADS == 0:
        slot = length * beams + beam
        tl.store(keys + slot * keys_column + index, new_key)
        tl.store(values + slot * values_column + index, new_value)
    largest = tl.sum(query * new_key.to(tl.float32), 0)
    total = 1.0
    accumulator = new_value.to(tl.float32)
    for start in range(0, length, BLOCK):
        position = start + tl.arange(0, BLOCK)
        writer = tl.load(writers + position, mask=position < length, other=255).to(tl.int64)
        visible = writer < beams
        slots = (position * beams + writer)[:, None]
        key = tl.load(keys + slots * keys_column + index[None, :], mask=visible[:, None], other=0.0).to(tl.float32)
        value = tl.load(values + slots * values_column + index[None, :], mask=visible[:, None], other=0.0)
        score = tl.where(visible, tl.sum(key * query[None, :], 1), -float("inf"))
        new_largest = tl.maximum(largest, tl.max(score, 0))
        rescale, weights = tl.exp(largest - new_largest), tl.exp(score - new_largest)
        total = total * rescale + tl.sum(weights, 0)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value.to(tl.float32), 0)
        largest = new_largest
    result = (accumulator / total).to(out.dtype.element_ty)
    tl.store(out + ((row * beams + beam) * H + head) * K + index, result)


@triton.jit
def attend_source_kernel(
    q, keys, values, valid, out, scale,
    q_row, q_head, q_query, keys_row, keys_head, keys_column, values_row, values_head, values_column, valid_row,
    H, queries, columns,
    HEADS: tl.constexpr, K: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program attends from one head of one query to all columns of its row that are valid.

    A query without a valid column gets 0.
    """
    launch_next(PDL)
    query_index, head = tl.program_id(0) % queries, tl.program_id(0) // queries % H
    row = (tl.program_id(0) // (queries * H)).to(tl.int64)
    group = head // HEADS
    index = tl.arange(0, K)
    wait_for_previous(PDL)
    keys += row * keys_row + group * keys_head
    values += row * values_row + group * values_head
    query = tl.load(q + row * q_row + head * q_head + query_index * q_query + index).to(tl.float32) * scale
    largest, total = -float("inf"), 0.0
    accumulator = tl.zeros((K,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        visible = column < columns
        if HAS_VALID:
            visible &= tl.load(valid + row * valid_row + column, mask=visible, other=0) != 0
        key = tl.load(keys + column[:, None] * keys_column + index[None, :], mask=visible[:, None], other=0.0)
        value = tl.load(values + column[:, None] * values_column + index[None, :], mask=visible[:, None], other=0.0)
        score = tl.where(visible, tl.sum(key.to(tl.float32) * query[None, :], 1), -float("inf"))
        new_largest = tl.maximum(largest, tl.max(score, 0))
        offset = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        rescale, weights = tl.exp(largest - offset), tl.exp(score - offset)
        total = total * rescale + tl.sum(weights, 0)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value.to(tl.float32), 0)
        largest = new_largest
    result = (accumulator / tl.where(total == 0.0, 1.0, total)).to(out.dtype.element_ty)
    tl.store(out + ((row * queries + query_index) * H + head) * K + index, result)


@triton.jit
def segment_maxima_kernel(
    logits, maxima, log_sums, row_stride, V, segments, size,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program reads one row of logits: the maximum of every segment of `size` values, and log Σ exp(logit)."""
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    logits += row * row_stride
    maxima += row * segments
    column = tl.arange(0, COLUMNS)[None, :]
    largest, total = -float("inf"), 0.0
    for first in range(0, segments, BLOCK):
        segment = first + tl.arange(0, BLOCK)
        token = segment[:, None] * size + column
        inside = (column < size) & (token < V)
        x = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 1)
        tl.store(maxima + segment, top, mask=segment < segments)
        new_largest = tl.maximum(largest, tl.max(top, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.sum(tl.exp(x - new_largest), 1), 0)
        largest = new_largest
    tl.store(log_sums + row, largest + tl.log(total))
