"""Keep track of which column of a cache holds which token, where the next token goes, and what a query may see.

Tokens are counted row by row without padding.  Blocks of one capacity share one `CacheIndex`, which has a column for
every token or, for windowed attention, a ring of window + chunk - 1 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.nn.kv_cache.linear_write import LinearWrite
from monoblock.nn.masks import Mask
from monoblock.nn.token_positions import TokenPositions

POSITION_FIELDS = ("positions", "token_index", "document", "prefix_or_global")
OPTIONAL_FIELDS = ("document", "prefix_or_global")


class BeamSlots(NamedTuple):
    """Where the tokens of the hypotheses are in the cache of a beam search (see beam_cache.py)."""

    writers: Tensor  # (searches, beams, positions) the beam that wrote each token; `beams` where there is none
    lengths: Tensor  # (searches,) the number of tokens before the new ones


class CacheWrite(NamedTuple):
    """The columns that one forward pass writes to, and the positions of the keys that its queries see.

    It is the same in all layers of one capacity.
    """

    columns: Tensor  # (B, T) the column of each new token; tokens that are not kept go to the scratch column at the end
    key_positions: TokenPositions
    num_visible: int  # the number of columns that the queries see
    is_concatenated: bool  # if the new tokens do not fit in the ring, queries see the old columns, then all new tokens
    linear: LinearWrite | None = None  # in a block with linear attention: which tokens its sums hold
    mask: Mask | None = None  # what the queries see, besides the mask of the block; None: no further restriction
    beams: BeamSlots | None = None  # in a beam search whose beams are tokens of one row: the same as `mask`


class CacheIndex:
    """The position, document and flag of the token in each column, the same in all layers of one capacity.

    Each field has shape (B, capacity + 1).
    """

    def __init__(self, batch: int, capacity: int, window: int | None, device: torch.device | None) -> None:
        self.capacity, self.window = capacity, window
        self.positions = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        self.token_index = torch.full_like(self.positions, -1)  # index of a column's token in its row; -1: empty
        self.document: Tensor | None = None
        self.prefix_or_global: Tensor | None = None

    def prepare_write(self, new_positions: TokenPositions, lengths: Tensor, max_length: int) -> CacheWrite:
        """Record the positions of new tokens; return the columns to write to and the positions of the keys they see."""
        B, T = lengths.shape[0], new_positions.length
        valid = new_positions.valid
        if valid is None:
            valid = torch.ones(1, 1, dtype=torch.bool, device=lengths.device)
        token_index = lengths[:, None] + valid.expand(B, T).long().cumsum(-1) - 1  # (B, T) among valid tokens
        limit = token_index[:, -1:] + 1
        is_concatenated = self.window is not None and self.max_droppable < T
        before = self._visible_positions(lengths[:, None], self.capacity) if is_concatenated else None
        kept = valid & (token_index >= limit - self.capacity)
        columns = torch.where(kept, token_index % self.capacity, self.capacity)
        self._record(new_positions, token_index, columns)
        if before is not None:
            return CacheWrite(columns, _concatenate_positions(before, new_positions, B), self.capacity, True)
        num_visible = self.capacity if self.window is not None else min(self.capacity, max_length + T)
        if new_positions.start is not None and self.is_sequential:
            key_positions = TokenPositions(self.positions[:1, :num_visible], start=0)
        else:
            key_positions = self._visible_positions(limit, num_visible)
        return CacheWrite(columns, key_positions, num_visible, False)

    @property
    def max_droppable(self) -> int:
        """The largest number of tokens that a pass may write and drop again: the ring without the window, and one."""
        return self.capacity if self.window is None else self.capacity - self.window + 1

    @property
    def is_sequential(self) -> bool:
        """Whether columns hold tokens in order and every token sees all tokens before it."""
        return self.window is None and self.document is None and self.prefix_or_global is None

    def _record(self, new_positions: TokenPositions, token_index: Tensor, columns: Tensor) -> None:
        B, T = columns.shape
        self.positions.scatter_(1, columns, new_positions.positions.expand(B, T))
        self.token_index.scatter_(1, columns, token_index)
        self.token_index[:, self.capacity] = -1
        for name in OPTIONAL_FIELDS:
            new, stored = getattr(new_positions, name), getattr(self, name)
            if new is None and stored is None:
                continue
            if stored is None:
                stored = torch.zeros_like(self.positions, dtype=new.dtype)
                setattr(self, name, stored)
            new = torch.zeros_like(columns, dtype=stored.dtype) if new is None else new.expand(B, T)
            stored.scatter_(1, columns, new)

    def _visible_positions(self, limit: Tensor, num_visible: int) -> TokenPositions:
        """Return the positions in the first `num_visible` columns; only the first `limit` (B, 1) tokens are valid."""
        token_index = self.token_index[:, :num_visible]
        document, prefix_or_global = (
            None if field is None else field[:, :num_visible].clone()
            for field in (self.document, self.prefix_or_global)
        )
        valid = (token_index >= 0) & (token_index < limit)
        return TokenPositions(self.positions[:, :num_visible].clone(), document, valid, prefix_or_global)

    def last_positions(self, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the position and the document of each row's last token, both (B, 1).

        An empty row has position -1, and the document is None if there are no documents.
        """
        column = ((lengths - 1).clamp(min=0) % self.capacity)[:, None]
        positions = self.positions.gather(1, column).masked_fill(lengths[:, None] == 0, -1)
        return positions, None if self.document is None else self.document.gather(1, column)

    def can_truncate(self, lengths: Tensor, max_written: Tensor) -> Tensor:
        """Return a boolean for each row (B,): whether the row can be cut to its first `lengths` tokens.

        The cache of a windowed layer is a ring that overwrites old tokens; `max_written` tokens were written to it.
        A row can be cut only if no token in the window of its next token has been overwritten.
        """
        if self.window is None:
            return torch.ones_like(lengths, dtype=torch.bool)
        return (max_written - self.capacity).clamp(min=0) <= (lengths + 1 - self.window).clamp(min=0)

    def select(self, rows: Tensor) -> None:
        self.map_tensors(lambda t: t[rows])

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by fn(tensor)."""
        for name, tensor in self.tensors().items():
            setattr(self, name, fn(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are set, by name."""
        fields = {name: getattr(self, name) for name in POSITION_FIELDS}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}


def _concatenate_positions(old: TokenPositions, new: TokenPositions, batch: int) -> TokenPositions:
    """Concatenate the positions in a ring and those of a chunk too long for the ring."""

    def concatenate(name: str, default: int | bool) -> Tensor | None:
        first, second = getattr(old, name), getattr(new, name)
        if first is None and second is None:
            return None
        first = torch.full_like(old.positions, default, dtype=second.dtype) if first is None else first
        second = torch.full_like(new.positions, default, dtype=first.dtype) if second is None else second
        return torch.cat((first, second.expand(batch, -1)), 1)

    positions = torch.cat((old.positions, new.positions.expand(batch, -1)), 1)
    return TokenPositions(
        positions, concatenate("document", 0), concatenate("valid", True), concatenate("prefix_or_global", False)
    )
