"""Where the tokens stand that a cache holds: which column each new one goes to, and what can then be seen.

Tokens are counted row by row, padding left out.  Blocks of one capacity share one `Places`: all of them full, or all a
ring of window + chunk - 1 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.masks import Where


class Entry(NamedTuple):
    """How one pass goes into the slots of one capacity, and where the keys stand that it then sees."""

    to: Tensor  # (B, T) the column each new token is written to; the spare last column takes what is not kept
    where: Where
    seen: int  # so many columns are handed out
    lengths: Tensor | None  # (B,) where a fixed cache takes one token a row: all columns below are seen, and no other
    appended: bool  # the old columns and all new tokens are handed out: the chunk is longer than the ring has room for


class Places:
    """Where the tokens stand that slots of one capacity hold; shared by all blocks of that capacity."""

    def __init__(self, batch: int, capacity: int, window: int | None, device: torch.device | None) -> None:
        self.capacity, self.window = capacity, window
        self.at = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        self.index = torch.full_like(self.at, -1)  # which token of the row a column holds, counted from its first
        self.document: Tensor | None = None
        self.flags: Tensor | None = None

    def enter(self, new: Where, lengths: Tensor, longest: int, fixed: bool = False) -> Entry:
        """Note where the new tokens stand; say which columns they go to and what is then seen."""
        if fixed and new.length == 1 and new.real is None and self.plain:
            return self._one(lengths)
        B, T = lengths.shape[0], new.length
        real = torch.ones(1, 1, dtype=torch.bool, device=lengths.device) if new.real is None else new.real
        index = lengths[:, None] + real.expand(B, T).long().cumsum(-1) - 1  # (B, T) of the row's real tokens
        limit = index[:, -1:] + 1
        appended = self.window is not None and T + self.window > self.capacity + 1
        before = self._where(lengths[:, None], self.capacity) if appended else None
        kept = real & (index >= limit - self.capacity)
        to = torch.where(kept, index % self.capacity, self.capacity)
        self._note(new, index, to)
        if before is not None:
            return Entry(to, _join(before, new, B), self.capacity, None, True)
        seen = self.capacity if self.window is not None else min(self.capacity, longest + T)
        if new.start is not None and self.window is None and self.document is None and self.flags is None:
            return Entry(to, Where(self.at[:1, :seen], start=0), seen, None, False)
        return Entry(to, self._where(limit, seen), seen, None, False)

    @property
    def plain(self) -> bool:
        """Columns hold tokens in their order, and a token sees all before it."""
        return self.window is None and self.document is None and self.flags is None

    def _one(self, lengths: Tensor) -> Entry:
        """One token a row behind all others, in as few operations as can be; `settle` notes them afterwards."""
        column = torch.arange(self.capacity, device=lengths.device)[None]
        where = Where(column, real=column <= lengths[:, None])
        return Entry(lengths[:, None], where, self.capacity, lengths, False)

    def settle(self, lengths: Tensor) -> None:
        """Note the tokens that came one by one."""
        if self.plain:
            column = torch.arange(self.capacity + 1, device=lengths.device)[None]
            known = self.index >= 0
            self.at = torch.where(known, self.at, column)
            self.index = torch.where(column < lengths[:, None], column, self.index)

    def _note(self, new: Where, index: Tensor, to: Tensor) -> None:
        B, T = to.shape
        self.at.scatter_(1, to, new.at.expand(B, T))
        self.index.scatter_(1, to, index)
        self.index[:, self.capacity] = -1
        for name in ("document", "flags"):
            field = getattr(new, name)
            if field is None and getattr(self, name) is None:
                continue
            if getattr(self, name) is None:
                setattr(self, name, torch.zeros_like(self.at, dtype=field.dtype))
            kept = getattr(self, name)
            kept.scatter_(1, to, torch.zeros_like(to, dtype=kept.dtype) if field is None else field.expand(B, T))

    def _where(self, limit: Tensor, seen: int) -> Where:
        """What the columns hold; one beyond the row's length was taken back and is not real."""
        index = self.index[:, :seen]
        cut = [None if field is None else field[:, :seen].clone() for field in (self.document, self.flags)]
        return Where(self.at[:, :seen].clone(), cut[0], (index >= 0) & (index < limit), cut[1])

    def last(self, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the last token of each row stands, -1 where there is none, and its document: (B, 1) each."""
        column = ((lengths - 1).clamp(min=0) % self.capacity)[:, None]
        at = self.at.gather(1, column).masked_fill(lengths[:, None] == 0, -1)
        return at, None if self.document is None else self.document.gather(1, column)

    def holds(self, lengths: Tensor, written: Tensor) -> Tensor:
        """Whether all that rows of these lengths can see is still there, after so many tokens were written."""
        if self.window is None:
            return torch.ones_like(lengths, dtype=torch.bool)
        return (written - self.capacity).clamp(min=0) <= (lengths + 1 - self.window).clamp(min=0)

    def select(self, rows: Tensor) -> None:
        for name in ("at", "index", "document", "flags"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[rows])

    def join(self, other: Places) -> None:
        self.at, self.index = torch.cat((self.at, other.at)), torch.cat((self.index, other.index))
        for name in ("document", "flags"):
            one, two = getattr(self, name), getattr(other, name)
            if one is not None or two is not None:
                one, two = (torch.zeros_like(other.at if t is two else self.at) if t is None else t for t in (one, two))
                setattr(self, name, torch.cat((one, two)))


def _join(old: Where, new: Where, batch: int) -> Where:
    """The places of a ring followed by those of a chunk too long for it."""

    def both(name: str, default: int | bool) -> Tensor | None:
        one, other = getattr(old, name), getattr(new, name)
        if one is None and other is None:
            return None
        one = torch.full_like(old.at, default, dtype=other.dtype) if one is None else one
        other = torch.full_like(new.at, default, dtype=one.dtype) if other is None else other
        return torch.cat((one, other.expand(batch, -1)), 1)

    at = torch.cat((old.at, new.at.expand(batch, -1)), 1)
    return Where(at, both("document", 0), both("real", True), both("flags", False))
