"""Keys and values kept between passes, one slot a block, with a length for each row and no common clock.

A pass writes at `lengths` and moves nothing: whoever runs the loop calls `advance`.  So a pass can be repeated, a draft
taken back (`truncate`), rows reordered (`select`) or copied (`fork`).  Padding is not stored: a row's length counts
real tokens.

    full      every place up to the capacity
    windowed  a ring of window + chunk - 1 places: what a window can still see while `chunk` tokens are written
    cross     the source's keys and values, computed once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config import AttentionConfig, StackConfig
from monoblock.errors import InputError
from monoblock.masks import Where
from monoblock.places import Entry, Places


class KeyValues(NamedTuple):
    keys: Tensor  # (B, G, S, K)
    values: Tensor  # (B, G, S, value size)


class Held:
    """Keys and values, once there are any."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def join(self, other: Held) -> None:
        """The rows of another below one's own."""
        if self.keys is None or self.values is None or other.keys is None or other.values is None:
            raise InputError("a cache that has seen nothing cannot be joined; run the model over it first")
        self.keys, self.values = torch.cat((self.keys, other.keys)), torch.cat((self.values, other.values))


class Slot(Held):
    """Keys and values of one block: (B, G, capacity + 1, size), the last column a spare that is never seen."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def store(self, keys: Tensor, values: Tensor, entry: Entry) -> KeyValues:
        """Write new keys and values (B, G, T, size); hand out all that may be seen."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (self._room(new) for new in (keys, values))
        if keys.dtype != self.keys.dtype:
            raise InputError(f"a cache of {self.keys.dtype} cannot take {keys.dtype}; make a new one with make_cache")
        old = KeyValues(self.keys[:, :, : entry.seen], self.values[:, :, : entry.seen])
        if entry.appended:
            old = KeyValues(torch.cat((old.keys, keys), 2), torch.cat((old.values, values), 2))
        first = entry.seen - keys.shape[2]  # where all rows go on, while they are equally long
        for room, new in ((self.keys, keys), (self.values, values)):
            if entry.where.start is not None and not entry.appended:
                room[:, :, first : entry.seen] = new
                continue
            room.scatter_(2, entry.to[:, None, :, None].expand(new.shape), new)
        return old

    def _room(self, new: Tensor) -> Tensor:
        B, G, _, K = new.shape
        return new.new_zeros(B, G, self.capacity + 1, K)


class CrossSlot(Held):
    """The source's keys and values of one block, computed on the first pass."""

    def fill(self, keys: Tensor, values: Tensor) -> KeyValues:
        self.keys, self.values = keys, values
        return KeyValues(keys, values)


def _wide(t: Tensor, length: int, axis: int, fill: float) -> Tensor:
    """Filled up at the end of one axis."""
    missing = [*t.shape[:axis], length - t.shape[axis], *t.shape[axis + 1 :]]
    return torch.cat((t, t.new_full(missing, fill)), axis)


def _plainly(where: Where, batch: int) -> Where:
    """The same places with a row for each of the batch, and what is real said of all."""
    real = torch.ones_like(where.at, dtype=torch.bool) if where.real is None else where.real
    return Where(where.at, real=real.expand(batch, -1))


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
        self.fixed = False  # every pass has the same shapes and writes in place, so that it can be replayed
        self.copies = 1  # rows that look at one source: beams of one sentence
        self.spare: Tensor | None = None  # where the next keys or values go whose rows change places
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
        if wanted > self.capacity:  # padding takes no room, and long rows may have gone: look before refusing
            self.longest = int(self.lengths.max())
            wanted = int((self.lengths + (new.length if new.real is None else new.real.sum(-1))).max())
        if wanted > self.capacity:
            raise InputError(
                f"the cache holds {self.capacity} tokens a row: {self.longest} are in it and {new.length} more were "
                f"given; make it with capacity={wanted} or more"
            )
        counts = new.length if new.real is None else new.real.sum(-1)
        if not self.fixed:
            self.written = torch.maximum(self.written, self.lengths + counts)
        entries = {
            size: places.enter(new, self.lengths, self.longest, self.fixed) for size, places in self.places.items()
        }
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

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; a row may be named several times.

        Where several rows look at one source, sources stay as they are unless it is said which to keep.
        """
        alike = len(rows) == self.batch and not self.fixed
        self.lengths, self.written = self.lengths[rows], self.written[rows]
        for places in self.places.values():
            places.select(rows)
        for slot in self.slots:
            # Beams change places at every step, and most of the room is still empty; a ring is full of what it holds.
            part = alike and slot.capacity == self.capacity
            slot.change((lambda t: self._moved(t, rows)) if part else (lambda t: t[rows]))
        if self.copies == 1:
            sources = rows
        if sources is not None:
            self._each_source(lambda t: t[sources])

    def _moved(self, t: Tensor, rows: Tensor) -> Tensor:
        """As many rows in another order, the columns that are seen alone; what they leave is the next spare."""
        if self.spare is None or self.spare.shape != t.shape or self.spare.dtype != t.dtype:
            self.spare = torch.zeros_like(t)
        to, self.spare = self.spare, t
        torch.index_select(t[:, :, : self.longest], 0, rows, out=to[:, :, : self.longest])
        return to

    def repeat(self, copies: int) -> None:
        """So many rows of each, one after the other; what they see of a source stays one."""
        if copies == 1:
            return
        if self.copies != 1:
            raise InputError("the rows of this cache were repeated before")
        rows = torch.arange(self.batch, device=self.lengths.device).repeat_interleave(copies)
        self.copies = copies
        self.select(rows)

    def join(self, other: Cache) -> None:
        """Add the rows of another cache of this model below one's own."""
        alike = (self.stack, self.capacity, self.copies) == (other.stack, other.capacity, other.copies)
        if not alike or self.places.keys() != other.places.keys():
            raise InputError("only caches of one model, one capacity and one number of copies can be joined")
        if self.memory is not None and other.memory is not None:  # while both still know how many rows are their own
            self._join_sources(other)
        self.lengths = torch.cat((self.lengths, other.lengths))
        self.written = torch.cat((self.written, other.written))
        self.longest = max(self.longest, other.longest)
        self.start = self.start if self.start == other.start else None
        for size, places in self.places.items():
            places.join(other.places[size])
        for mine, theirs in zip(self.slots, other.slots, strict=True):
            mine.join(theirs)

    def _join_sources(self, other: Cache) -> None:
        assert self.memory is not None
        assert other.memory is not None
        length = max(self.memory.length, other.memory.length)
        one, two = (_plainly(c.memory, c.batch // c.copies) for c in (self, other) if c.memory is not None)
        real = torch.cat([_wide(w.real, length, 1, False) for w in (one, two) if w.real is not None])
        self.memory = Where(torch.arange(length, device=self.lengths.device)[None], real=real)
        for mine, theirs in zip(self.cross, other.cross, strict=True):
            if mine is not None and theirs is not None:
                mine.change(lambda t: _wide(t, length, 2, 0))
                theirs.change(lambda t: _wide(t, length, 2, 0))
                mine.join(theirs)

    def _each_source(self, change: Callable[[Tensor], Tensor]) -> None:
        for slot in self.cross:
            if slot is not None:
                slot.change(change)
        if self.memory is not None:
            self.memory = self.memory.each(lambda t: change(t) if t.shape[0] > 1 else t)

    def fix(self) -> None:
        """From now on nothing depends on what the host knows of the lengths: all columns are handed out and masked."""
        self.fixed, self.start, self.longest = True, None, self.capacity - 1

    def loosen(self) -> None:
        """The reverse: the host looks at the lengths again."""
        self.fixed, self.longest = False, int(self.lengths.max())
        for places in self.places.values():
            places.settle(self.lengths)
        self.written = torch.maximum(self.written, self.lengths)

    def take(self, other: Cache) -> bool:
        """Take over all that another cache of the same shapes holds, in place; False where shapes differ."""
        mine, theirs = self._tensors(), other._tensors()
        if (self.stack, self.copies) != (other.stack, other.copies) or mine.keys() != theirs.keys():
            return False
        if any(mine[name].shape != theirs[name].shape for name in mine) or self.memory is not None:
            return False
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        return True

    def _tensors(self) -> dict[str, Tensor]:
        """All that a decoder without sources holds, by name."""
        held: dict[str, Tensor | None] = {"lengths": self.lengths}
        for number, slot in enumerate(self.slots):
            held |= {f"{number}.keys": slot.keys, f"{number}.values": slot.values}
        for size, places in self.places.items():
            held |= {f"{size}.{name}": getattr(places, name) for name in ("at", "index", "document", "flags")}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def fork(self, row: int) -> None:
        """Add a copy of one row at the end."""
        if not -self.batch <= row < self.batch:
            raise InputError(f"there is no row {row} in a cache of {self.batch}")
        rows = torch.arange(self.batch, device=self.lengths.device)
        self.select(torch.cat((rows, rows[row].view(1))))

    @property
    def documents(self) -> bool:
        """Whether what it holds is told apart by document."""
        return next(iter(self.places.values())).document is not None

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
