"""Positions, documents, padding and flags of a batch of tokens, from which masks and encodings are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> TokenPositions:
        """Return a copy with a function applied to every tensor."""
        fields = {name: getattr(self, name) for name in ("positions", "document", "valid", "prefix_or_global")}
        changed: dict[str, Any] = {name: fn(field) for name, field in fields.items() if field is not None}
        return replace(self, **changed)


def arange_positions(length: int, start: int = 0, device: torch.device | None = None) -> TokenPositions:
    """Positions start, start + 1, …, the same in every row."""
    return TokenPositions(torch.arange(start, start + length, device=device)[None], start=start)
