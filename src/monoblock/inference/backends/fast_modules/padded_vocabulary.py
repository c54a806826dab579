"""Pad an output table (V, D) with rows of zeros if V is not a multiple of 8.

Tensor cores write eight 16-bit results at a time.  With GPT-2's V = 50,257 they write one by one, and the product that
computes the logits takes six times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.transformer import Transformer

ROW_MULTIPLE = 8


class PaddedVocabulary:
    """An output table with rows of zeros added.

    `table` is a view of the weight if the zeros are already stored after it (see `make_room`), otherwise a copy.
    """

    def __init__(self, weight: Tensor) -> None:
        view = padded_view(weight)
        self.weight, self.is_copy = weight, view is None
        self.table = view if view is not None else _pad(weight)

    @classmethod
    def build(cls, weight: Tensor) -> PaddedVocabulary | None:
        """Return `weight` (V, D) with padding, or None if it needs no padding.

        Padding is needed for a 16-bit tensor on a GPU if V is not a multiple of 8.
        """
        return cls(weight) if needs_padding(weight) else None

    def refresh(self) -> None:
        """Copy the current weight into `table`; do nothing if `table` is a view of it."""
        if self.is_copy:
            self.table[: len(self.weight)].copy_(self.weight.detach())


def needs_padding(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in HALF_DTYPES and weight.shape[0] % ROW_MULTIPLE != 0


def output_table(model: Transformer) -> Tensor | None:
    """Return the matrix (V, D) that computes the logits, or None if it is not a plain tensor."""
    head = model.head
    table = model.output_embedding if head is None or head.output is None else getattr(head.output, "weight", None)
    return table if isinstance(table, Tensor) else None


def make_room(weight: Tensor) -> None:
    """Move a weight into a larger storage with rows of zeros after it; the shape and values of the weight stay."""
    if padded_view(weight) is None:
        weight.data = _pad(weight)[: len(weight)]


def _pad(weight: Tensor) -> Tensor:
    rows, width = weight.shape
    padded = torch.zeros(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, width, dtype=weight.dtype, device=weight.device)
    padded[:rows] = weight.detach()
    return padded


def padded_view(weight: Tensor) -> Tensor | None:
    """Return a view of a weight and the rows of zeros stored after it; None if there are none (see `make_room`)."""
    rows, width = weight.shape
    if rows % ROW_MULTIPLE == 0:
        return None
    size = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    nbytes = size * width * weight.element_size()
    has_room = weight.is_contiguous() and weight.storage_offset() == 0 and weight.untyped_storage().nbytes() == nbytes
    return weight.detach().as_strided((size, width), (width, 1)) if has_room else None
