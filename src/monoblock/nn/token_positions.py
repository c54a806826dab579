"""Positions, documents, padding and flags of a batch of tokens, from which masks and encodings are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from monoblock.nn.packed.documents import DocumentRows, PackedDocuments


@dataclass(frozen=True)
class TokenPositions:
    """The position of every token; each field is (B, T), or (1, T) if all rows are equal.

    `start` is set if the host knows, without reading a tensor, that every row has the positions start, start + 1, …,
    no padding and one document.
    """

    positions: Tensor
    document: Tensor | None = None
    valid: Tensor | None = None  # False on padding, which no query sees
    prefix_or_global: Tensor | None = None  # True on global tokens, or on the tokens of a prefix
    start: int | None = None
    packed: PackedDocuments | None = None  # the same documents as `document`, if it is known where they begin
    features: dict[str, Tensor] = field(default_factory=dict, compare=False)  # of every token, by name (see MaskTerm)

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    @property
    def batch(self) -> int:
        """The number of rows: 1 if every field is the same in all rows."""
        fields = (self.positions, self.document, self.valid, self.prefix_or_global)
        return max(field.shape[0] for field in fields if field is not None)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> TokenPositions:
        """Return a copy with a function applied to every tensor."""
        fields = {name: getattr(self, name) for name in ("positions", "document", "valid", "prefix_or_global")}
        changed: dict[str, Any] = {name: fn(field) for name, field in fields.items() if field is not None}
        if self.features:
            changed["features"] = {name: fn(feature) for name, feature in self.features.items()}
        return replace(self, **changed)

    def as_rows(self, *, padding: bool = True) -> TokenPositions:
        """Return the positions of packed documents as rows, one for each document, padded to equal length.

        With padding=False the padding is not marked as such, for a mask that hides it in any case.
        """
        assert self.packed is not None
        tokens = arange_positions(self.packed.max_length, device=self.positions.device)
        flags = self.prefix_or_global
        flags = None if flags is None else DocumentRows(self.packed).to_rows(flags[0])
        if flags is None and not padding:
            return tokens
        return TokenPositions(tokens.positions, valid=self.packed.valid() if padding else None, prefix_or_global=flags)


@dataclass(frozen=True)
class TokenRanges:
    """The smallest and the largest value of every field in each tile of successive tokens, (B, tiles) each.

    Padding is left out of the ranges; `high.valid` is False for a tile of padding only.
    """

    low: TokenPositions
    high: TokenPositions

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> TokenRanges:
        """Return a copy with a function applied to every tensor."""
        return TokenRanges(self.low.map_tensors(fn), self.high.map_tensors(fn))


def arange_positions(length: int, start: int = 0, device: torch.device | None = None) -> TokenPositions:
    """Return the positions start, start + 1, …, which are the same in every row."""
    return TokenPositions(torch.arange(start, start + length, device=device)[None], start=start)
