"""Plans: which samples make up the batch of a step, for any step, without having gone through those before it.

A plan knows nothing of processes: a batch is the same whatever the number of ranks, and `split` gives each its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from monoblock.data.order import draws, permutation
from monoblock.errors import InputError

EPOCHS_HELD = 2  # a loader that runs ahead of its user stands with a foot in each of two


class Batch(NamedTuple):
    epoch: int
    samples: NDArray[np.int64]


class Plan(Protocol):
    """What a loader needs of one."""

    def at(self, step: int) -> Batch: ...


def split(batch: Batch, rank: int, world: int) -> Batch:
    """A rank's part of a batch: every world-th sample, so that all parts together are the batch.

    Parts differ by at most one sample, and are empty where the batch has fewer samples than there are ranks.
    """
    if not 0 <= rank < world:
        raise InputError(f"rank={rank} is none of {world}; write 0 to {world - 1}")
    return Batch(batch.epoch, batch.samples[rank::world])


class FixedPlan:
    """Batches of one size.  The last of an epoch is short, or with last="drop" left out together with its samples."""

    split = staticmethod(split)

    def __init__(self, count: int, batch: int, seed: int, *, last: Literal["short", "drop"] = "short") -> None:
        if count < 1 or batch < 1:
            raise InputError(f"count={count} and batch={batch} cannot be; write 1 or more")
        if last == "drop" and count < batch:
            raise InputError(f"batch={batch} is more than the {count} samples there are; write {count} or less")
        self.count, self.batch, self.seed = count, batch, seed
        self.batches = count // batch if last == "drop" else -(-count // batch)  # of an epoch

    def at(self, step: int) -> Batch:
        epoch, place = _epoch(step, self.batches)
        order = permutation(self.seed, epoch, self.count)
        return Batch(epoch, order[place * self.batch : (place + 1) * self.batch])


class BucketPlan:
    """Samples of like length together, so that little is padding.

    `lengths` is (samples,), or (samples, texts) where a sample has several.  A batch holds at most `batch` samples, and
    at most `max_tokens` tokens, padding included: samples × (longest source + longest target).  Within an epoch samples
    are sorted by length, those of one length in an order of the epoch's own, and cut; then the batches are shuffled.
    """

    split = staticmethod(split)

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        seed: int,
        max_tokens: int | None = None,
        batch: int | None = None,
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        if self.lengths.ndim == 1:
            self.lengths = self.lengths[:, None]
        if self.lengths.ndim != 2 or not len(self.lengths):
            raise InputError(f"lengths of shape {self.lengths.shape} cannot be; give (samples,) or (samples, texts)")
        if (max_tokens is None and batch is None) or (batch is not None and batch < 1):
            raise InputError(f"batch={batch} cannot be; write max_tokens=…, or a batch of 1 or more")
        self.seed, self.max_tokens, self.batch = seed, max_tokens, batch
        self._cuts = self._cut()
        self.batches = len(self._cuts) - 1  # of an epoch
        self._held: dict[int, NDArray[np.int64]] = {}

    def at(self, step: int) -> Batch:
        epoch, place = _epoch(step, self.batches)
        number = int(permutation(self.seed, epoch, self.batches, "batches")[place])
        return Batch(epoch, self._sorted(epoch)[self._cuts[number] : self._cuts[number + 1]])

    def _sorted(self, epoch: int) -> NDArray[np.int64]:
        """All samples by length, ties in an order of this epoch's own."""
        if epoch not in self._held:
            while len(self._held) >= EPOCHS_HELD:
                del self._held[next(iter(self._held))]
            chance = draws(self.seed, epoch, len(self.lengths))
            order = np.lexsort((chance, *self.lengths.T)).astype(np.int64)
            order.setflags(write=False)
            self._held[epoch] = order
        return self._held[epoch]

    def _cut(self) -> list[int]:
        """Where batches begin in the sorted row.  It holds the same lengths in every epoch, so the cuts do, too."""
        samples, tokens = self.batch or len(self.lengths), self.max_tokens
        order = np.lexsort(tuple(self.lengths.T))
        cuts, widest = [0], [0] * self.lengths.shape[1]
        for place, lengths in enumerate(self.lengths[order].tolist()):
            if tokens is not None and sum(lengths) > tokens:
                told = f"sample {order[place]} has {sum(lengths)} tokens, more than max_tokens={tokens}"
                raise InputError(f"{told}; raise it, or leave long samples out")
            together = list(map(max, widest, lengths))
            count = place - cuts[-1] + 1
            if count > samples or (tokens is not None and count * sum(together) > tokens):
                cuts.append(place)
                together = lengths
            widest = together
        return [*cuts, len(self.lengths)]


def _epoch(step: int, batches: int) -> tuple[int, int]:
    if step < 0:
        raise InputError(f"step={step} cannot be; the first is 0")
    return divmod(step, batches)
