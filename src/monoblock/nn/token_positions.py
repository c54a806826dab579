"""Positions, documents, padding and flags of a batch of tokens, from which masks and encodings are computed."""

from __future__ import annotations

import warnings
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

    # -- old names, removed in the next release --------------------------------------------------------------------

    @property
    def at(self) -> Tensor:
        _warn_of_old_names()
        return self.positions

    @property
    def real(self) -> Tensor | None:
        _warn_of_old_names()
        return self.valid

    @property
    def flags(self) -> Tensor | None:
        _warn_of_old_names()
        return self.prefix_or_global

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenPositions:
        _warn_of_old_names()
        return self.map_tensors(change)


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


# -- the old name of TokenPositions, removed in the next release ------------------------------------------------------

_has_warned = False


def _warn_of_old_names() -> None:
    """Warn once that `at`, `real`, `flags` and `each` have new names, unless `monoblock.Where` has warned already."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        message = (
            "at, real, flags and each are now positions, valid, prefix_or_global and map_tensors of "
            "monoblock.TokenPositions; the old names will be removed in the next release"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=3)


class _OldName(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, TokenPositions)


class Where(metaclass=_OldName):
    """The old name of `TokenPositions`: `Where(at, document, real, flags, start)` makes one."""

    def __new__(  # type: ignore[misc]
        cls,
        at: Tensor,
        document: Tensor | None = None,
        real: Tensor | None = None,
        flags: Tensor | None = None,
        start: int | None = None,
    ) -> TokenPositions:
        global _has_warned
        _has_warned = True
        return TokenPositions(at, document, real, flags, start)
