"""Triton source of the kernel in fp8_linear.py; imported only if Triton is installed and there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


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
def gelu_rows_kernel(
    x, out, values, scales, K, largest_value, smallest_maximum, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """Each program computes GELU of one row of K numbers, stores it, and rounds it as `quantize_rows_kernel` does."""
    row = tl.program_id(0).to(tl.int64) * K
    offsets = tl.arange(0, BLOCK)
    is_inside = offsets < K
    u = tl.load(x + row + offsets, mask=is_inside, other=0.0).to(tl.float32)
    result = (u * tl.sigmoid(2.0 * _gelu_argument(u))).to(out.dtype.element_ty)
    tl.store(out + row + offsets, result, mask=is_inside)
    _store_rounded(result, values + row, scales, offsets, is_inside, largest_value, smallest_maximum)


@triton.jit
def gelu_backward_rows_kernel(
    x, grad, out, values, scales, K, largest_value, smallest_maximum, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """Each program multiplies one row of gradients by the derivative of GELU, stores the product, and rounds it."""
    row = tl.program_id(0).to(tl.int64) * K
    offsets = tl.arange(0, BLOCK)
    is_inside = offsets < K
    u = tl.load(x + row + offsets, mask=is_inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row + offsets, mask=is_inside, other=0.0).to(tl.float32)
    half = tl.sigmoid(2.0 * _gelu_argument(u))  # (1 + tanh(z)) / 2
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * u * u)  # of z
    result = (g * (half + 2.0 * u * half * (1.0 - half) * slope)).to(out.dtype.element_ty)
    tl.store(out + row + offsets, result, mask=is_inside)
    _store_rounded(result, values + row, scales, offsets, is_inside, largest_value, smallest_maximum)


@triton.jit
def _gelu_argument(u) -> Any:
    """z in GELU(u) = u (1 + tanh(z)) / 2 = u sigmoid(2 z)."""
    return 0.7978845608028654 * (u + 0.044715 * u * u * u)


@triton.jit
def _store_rounded(result, values, scales, offsets, is_inside, largest_value, smallest_maximum) -> Any:
    numbers = tl.where(is_inside, result.to(tl.float32), 0.0)
    largest = tl.maximum(tl.max(tl.abs(numbers), 0), smallest_maximum)
    rounded = (numbers * tl.div_rn(largest_value, largest)).to(values.dtype.element_ty)
    tl.store(values + offsets, rounded, mask=is_inside)
    tl.store(scales + tl.program_id(0), tl.div_rn(largest, largest_value))
