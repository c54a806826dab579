"""A vocabulary that 8 does not divide, laid in memory as if it did.

Matrix units write eight 16-bit results at a time; GPT-2's 50,257 logits a row make them write one by one, and the last
product of a step takes six times as long.  The table gets a few rows of nothing behind it, and stays a view of that.
"""

from __future__ import annotations

from torch import Tensor

from monoblock.model import Transformer
from monoblock.norm import HALF

AT_ONCE = 8


def align(model: Transformer) -> None:
    """Lay the output's table where there is room for the rows that are missing; the model keeps its shapes."""
    head = model.head
    table = model.table if head is None or head.output is None else getattr(head.output, "weight", None)
    if isinstance(table, Tensor) and table.is_cuda and table.dtype in HALF and roomy(table) is None:
        widen(table)


def widen(table: Tensor) -> None:
    rows, width = table.shape
    if rows % AT_ONCE:
        room = table.new_zeros(-(-rows // AT_ONCE) * AT_ONCE, width)
        room[:rows] = table.detach()
        table.data = room[:rows]


def roomy(table: Tensor) -> Tensor | None:
    """The table with the rows of nothing behind it, where it was widened."""
    rows, width = table.shape
    if rows % AT_ONCE == 0:
        return None
    size = -(-rows // AT_ONCE) * AT_ONCE
    room = size * width * table.element_size()
    fits = table.is_contiguous() and table.storage_offset() == 0 and table.untyped_storage().nbytes() == room
    return table.as_strided((size, width), (width, 1)) if fits else None
