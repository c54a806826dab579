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
