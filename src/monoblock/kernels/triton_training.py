"""Triton source of the kernels in fp8_linear.py and linear_cross_entropy.py, imported only if it can be compiled."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def quantize_rows_kernel(
    x, values, scales, K, row_stride, largest_value, smallest_maximum, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """Each program divides one row of K numbers by its scale, such that the largest becomes `largest_value`."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    is_inside = offsets < K
    numbers = tl.load(x + row * row_stride + offsets, mask=is_inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(numbers), 0), smallest_maximum)
    rounded = (numbers * tl.div_rn(largest_value, largest)).to(values.dtype.element_ty)
    tl.store(values + row * K + offsets, rounded, mask=is_inside)
    tl.store(scales + row, tl.div_rn(largest, largest_value))


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, V, row_stride, ignore_index, smoothing,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """Each program computes the loss of one row of logits and overwrites the row with its gradient.

    The row has V logits and is padded to `row_stride` columns; the gradient of the padding is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logits += row * row_stride
    offsets = tl.arange(0, BLOCK)
    is_target = label != ignore_index
    largest = -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    plain_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        index = start + offsets
        x = tl.load(logits + index, mask=index < V, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp2((largest - new_largest) * LOG2_E) + tl.exp2((x - new_largest) * LOG2_E)
        largest = new_largest
        if SMOOTHED:
            plain_sum += tl.where(index < V, x, 0.0)
    log_sum = largest + tl.log2(tl.sum(total, 0)) / LOG2_E
    target = tl.load(logits + tl.where(is_target, label, 0)).to(tl.float32)
    loss = log_sum - (1.0 - smoothing) * target
    share = 0.0
    if SMOOTHED:
        share = smoothing / V
        loss -= share * tl.sum(plain_sum, 0)
    tl.store(losses + row, tl.where(is_target, loss, 0.0))
    for start in range(0, row_stride, BLOCK):
        index = start + offsets
        x = tl.load(logits + index, mask=index < V, other=-float("inf")).to(tl.float32)
        gradient = tl.exp2((x - log_sum) * LOG2_E) - share - tl.where(index == label, 1.0 - smoothing, 0.0)
        gradient = tl.where(is_target & (index < V), gradient, 0.0)
        tl.store(logits + index, gradient.to(logits.dtype.element_ty), mask=index < row_stride)
