"""The order of the axes of what a plain model returns."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Layout = Literal["rows first", "time first", "classes second", "flat"]  # (B, T, V), (T, B, V), (B, V, T), (B·T, V)


def find_layout(output: Tensor, length: int, vocab: int) -> Layout:
    """Return the order of the axes of an output for two rows; the length is equal to no other size."""
    shape = tuple(output.shape)
    if len(shape) == 3 and shape[:2] == (length, 2):
        return "time first"
    if len(shape) == 3 and shape[0] == 2 and shape[2] == length and shape[1] >= vocab:
        return "classes second"
    return "flat" if len(shape) == 2 and shape[0] == 2 * length else "rows first"


def to_rows(output: Tensor, layout: Layout, rows: int) -> Tensor:
    """Bring an output into the order (B, T, *)."""
    if layout == "flat":
        return output.unflatten(0, (rows, -1)) if len(output) % rows == 0 else output
    if layout == "rows first" or output.dim() != 3:
        return output
    return output.transpose(0, 1) if layout == "time first" else output.transpose(1, 2)
