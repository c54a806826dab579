"""Keys and values kept between passes, one slot a block, with a length for each row and no common clock.

A pass writes at `lengths` and moves nothing: whoever runs the loop calls `advance`.  So a pass can be repeated, a draft
taken back (`truncate`), rows reordered (`select`) or copied (`fork`).  Padding is not stored: a row's length counts
real tokens.

    full      every place up to the capacity
    windowed  a ring of window + chunk - 1 places: what a window can still see while `chunk` tokens are written
    cross     the source's keys and values, computed once
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config import AttentionConfig, StackConfig
from monoblock.errors import InputError
from monoblock.masks import Where


class KeyValues(NamedTuple):
    keys: Tensor  # (B, G, S, K)
    values: Tensor  # (B, G, S, value size)


class Entry(NamedTuple):
    """How one pass goes into the slots of one capacity, and where the keys stand that it then sees."""

    to: Tensor  # (B, T) the column each new token is written to; the spare last column takes what is not kept
    where: Where
    seen: int  # so many columns are handed out
    appended: bool  # the old columns and all new tokens are handed out: the chunk is longer than the ring has room for


class Slot:
    """Keys and values of one block: (B, G, capacity + 1, size), the last column a spare that is never seen."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def store(self, keys: Tensor, values: Tensor, entry: Entry) -> KeyValues:
        """Write new keys and values (B, G, T, size); hand out all that may be seen."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (self._room(new) for new in (keys, values))
        if keys.dtype != self.keys.dtype:
            raise InputError(f"a cache of {self.keys.dtype} cannot take {keys.dtype}; make a new one with make_cache")
        old = KeyValues(self.keys[:, :, : entry.seen], self.values[:, :, : entry.seen])
        if entry.appended:
            old = KeyValues(torch.cat((old.keys, keys), 2), torch.cat((old.values, values), 2))
        for room, new in ((self.keys, keys), (self.values, values)):
            room.scatter_(2, entry.to[:, None, :, None].expand(new.shape), new)
        return old

    def _room(self, new: Tensor) -> Tensor:
        B, G, _, K = new.shape
        return new.new_zeros(B, G, self.capacity + 1, K)


class CrossSlot:
    """The source's keys and values of one block, computed on the first pass."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def fill(self, keys: Tensor, values: Tensor) -> KeyValues:
        self.keys, self.values = keys, values
        return KeyValues(keys, values)


class Places:
    """Where the tokens stand that slots of one capacity hold; shared by all blocks of that capacity."""

    def __init__(self, batch: int, capacity: int, window: int | None, device: torch.device | None) -> None:
        self.capacity, self.window = capacity, window
        self.at = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        self.index = torch.full_like(self.at, -1)  # which token of the row a column holds, counted from its first
        self.document: Tensor | None = None
        self.flags: Tensor | None = None

    def enter(self, new: Where, lengths: Tensor, longest: int) -> Entry:
        """Note where the new tokens stand; say which columns they go to and what is then seen."""
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
            return Entry(to, _join(before, new, B), self.capacity, True)
        seen = self.capacity if self.window is not None else min(self.capacity, longest + T)
        if new.start is not None and self.window is None and self.document is None and self.flags is None:
            return Entry(to, Where(self.at[:1, :seen], start=0), seen, False)
        return Entry(to, self._where(limit, seen), seen, False)

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


class Cache:
    """The slots of one decoder for `batch` rows of at most `capacity` tokens, given at most `chunk` at a time.

    A longer chunk is right too, only slower where there are windows.
    """

    def __init__(
        self, stack: StackConfig, *, batch: int, capacity: int, chunk: int = 16, device: torch.device | None = None
    ) -> None:
        if batch < 1 or capacity < 1 or chunk < 1:
            raise InputError(f"a cache of batch={batch}, capacity={capacity}, chunk={chunk} cannot be; write 1 or more")
        self.stack, self.capacity = stack, capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.written = torch.zeros_like(self.lengths)  # the most tokens ever written to a row
        self.start: int | None = 0  # the common length, while the host knows that all rows have it
        self.longest = 0
        self.slots: list[Slot] = []
        self.cross: list[CrossSlot | None] = []
        self.places: dict[int, Places] = {}
        self.memory: Where | None = None  # where the source stands
        for block in stack.layers():
            size, window = self._size(block.attention, chunk)
            self.slots.append(Slot(size))
            self.cross.append(CrossSlot() if block.cross is not None else None)
            self.places.setdefault(size, Places(batch, size, window, device))

    def _size(self, config: AttentionConfig, chunk: int) -> tuple[int, int | None]:
        """The columns a block needs, and its window when they are a ring."""
        beyond = config.global_tokens or config.random_blocks
        if config.window is None or beyond or config.window + chunk - 1 >= self.capacity:
            return self.capacity, None
        return config.window + chunk - 1, config.window

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def enter(self, new: Where) -> list[Entry]:
        """Prepare the slots for a pass over new tokens: one entry a block."""
        wanted = self.longest + new.length
        if new.real is not None and wanted > self.capacity:  # padding takes no room: look before refusing
            wanted = int((self.lengths + new.real.sum(-1)).max())
        if wanted > self.capacity:
            raise InputError(
                f"the cache holds {self.capacity} tokens a row: {self.longest} are in it and {new.length} more were "
                f"given; make it with capacity={wanted} or more"
            )
        counts = new.length if new.real is None else new.real.sum(-1)
        self.written = torch.maximum(self.written, self.lengths + counts)
        entries = {size: places.enter(new, self.lengths, self.longest) for size, places in self.places.items()}
        return [entries[slot.capacity] for slot in self.slots]

    def advance(self, counts: int | Tensor) -> None:
        """Keep so many of the tokens just written: one number for all rows, or one a row."""
        least, most = (counts, counts) if isinstance(counts, int) else (int(counts.min()), int(counts.max()))
        if least < 0 or (isinstance(counts, int) and self.longest + most > self.capacity):
            raise InputError(f"a cache of {self.capacity} that holds {self.longest} cannot keep {counts} tokens more")
        self.lengths = self.lengths + counts
        if isinstance(counts, int):
            self.start = None if self.start is None else self.start + counts
            self.longest += counts
        else:
            self.start, self.longest = None, int(self.lengths.max())

    def truncate(self, lengths: int | Tensor) -> None:
        """Take back what lies beyond these lengths; where a ring has let go of what came before, that is an error."""
        if int(torch.as_tensor(lengths).min()) < 0:
            raise InputError(f"a cache cannot be cut to {lengths} tokens; write 0 or more")
        wanted = torch.minimum(self.lengths, torch.as_tensor(lengths, device=self.lengths.device))
        if not all(bool(places.holds(wanted, self.written).all()) for places in self.places.values()):
            most = int((self.written - wanted).max())
            raise InputError(
                f"{most} tokens cannot be taken back: a windowed block has overwritten what came before them; "
                f"make the cache with chunk={most} or more"
            )
        self.written = torch.where(wanted == 0, 0, self.written)
        self.lengths = wanted
        self.longest = int(self.lengths.max())
        self.start = self.longest if self.start is not None and isinstance(lengths, int) else None

    def select(self, rows: Tensor) -> None:
        """Keep these rows in this order; a row may be named several times."""
        self.lengths, self.written = self.lengths[rows], self.written[rows]
        for places in self.places.values():
            places.select(rows)
        for slot in (*self.slots, *self.cross):
            if slot is not None and slot.keys is not None and slot.values is not None:
                slot.keys, slot.values = slot.keys[rows], slot.values[rows]
        if self.memory is not None:
            self.memory = self.memory.each(lambda t: t[rows] if t.shape[0] > 1 else t)

    def fork(self, row: int) -> None:
        """Add a copy of one row at the end."""
        if not -self.batch <= row < self.batch:
            raise InputError(f"there is no row {row} in a cache of {self.batch}")
        rows = torch.arange(self.batch, device=self.lengths.device)
        self.select(torch.cat((rows, rows[row].view(1))))

    def last(self) -> tuple[Tensor, Tensor | None]:
        """Where the last token of each row stands, and its document."""
        return next(iter(self.places.values())).last(self.lengths)

    @property
    def bytes(self) -> int:
        """What the slots hold now."""
        own = [
            t[:, :, :-1] for slot in self.slots for t in (slot.keys, slot.values) if t is not None
        ]  # no spare column
        cross = [t for slot in self.cross if slot for t in (slot.keys, slot.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in own + cross)
