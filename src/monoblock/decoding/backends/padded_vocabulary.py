"""An output table whose number of rows is not a multiple of 8, with rows of zeros below it.

Tensor cores write eight 16-bit results at a time.  With GPT-2's 50,257 rows they write one by one, and the last product
of a step takes six times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.transformer import Transformer

ROW_MULTIPLE = 8


class PaddedVocabulary:
    """A table with rows of zeros: a view where the table has room behind it (`make_room`), else a second copy."""

    def __init__(self, weight: Tensor) -> None:
        view = padded_view(weight)
        self.weight, self.is_copy = weight, view is None
        self.table = view if view is not None else _pad(weight)

    @classmethod
    def build(cls, weight: Tensor) -> PaddedVocabulary | None:
        """Pad a 16-bit table on a GPU; None where there is nothing to gain."""
        return cls(weight) if needs_padding(weight) else None

    def refresh(self) -> None:
        """Copy the table anew."""
        if self.is_copy:
            self.table[: len(self.weight)].copy_(self.weight.detach())


def needs_padding(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in HALF_DTYPES and weight.shape[0] % ROW_MULTIPLE != 0


def output_table(model: Transformer) -> Tensor | None:
    """The matrix that logits are computed with, where it is a plain tensor."""
    head = model.head
    table = model.output_embedding if head is None or head.output is None else getattr(head.output, "weight", None)
    return table if isinstance(table, Tensor) else None


def make_room(weight: Tensor) -> None:
    """Move a table into a storage with room for the rows of zeros behind it; it stays as it was for everybody else."""
    if padded_view(weight) is None:
        weight.data = _pad(weight)[: len(weight)]


def _pad(weight: Tensor) -> Tensor:
    rows, width = weight.shape
    padded = torch.zeros(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, width, dtype=weight.dtype, device=weight.device)
    padded[:rows] = weight.detach()
    return padded


def padded_view(weight: Tensor) -> Tensor | None:
    """View a table together with the room behind it; None if it has none."""
    rows, width = weight.shape
    if rows % ROW_MULTIPLE == 0:
        return None
    size = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    nbytes = size * width * weight.element_size()
    has_room = weight.is_contiguous() and weight.storage_offset() == 0 and weight.untyped_storage().nbytes() == nbytes
    return weight.detach().as_strided((size, width), (width, 1)) if has_room else None
