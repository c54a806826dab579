"""Batch plans, which decide which samples form the batch of each training step, and the loader of batches.

The batch of any step is computed directly, without the steps before it. A plan does not depend on the number of
processes: `batch_for_rank` returns the share of a batch that belongs to one rank.
"""

from __future__ import annotations

import functools
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from types import FrameType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import InputError, MonoblockError

MAX_CACHED_EPOCHS = 2  # around the end of an epoch, a loader that runs ahead needs two


class BatchIndices(NamedTuple):
    epoch: int
    indices: NDArray[np.int64]


class BatchPlan(Protocol):
    def batch_at(self, step: int) -> BatchIndices: ...


def batch_for_rank(batch: BatchIndices, rank: int, world_size: int) -> BatchIndices:
    """Return the share of a batch that belongs to one rank: every `world_size`-th sample, from sample `rank` on.

    Shares differ by at most one sample, and may be empty if the batch has fewer samples than there are ranks.
    """
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank} is out of range for world_size={world_size}; write 0 to {world_size - 1}")
    return BatchIndices(batch.epoch, batch.indices[rank::world_size])


class FixedBatchPlan:
    """Batches of `batch` samples each; every epoch visits all `count` samples in a new random order.

    The last batch of an epoch may have fewer samples; with last="drop" such a batch is left out.
    """

    def __init__(self, count: int, batch: int, seed: int, *, last: Literal["short", "drop"] = "short") -> None:
        if count < 1 or batch < 1:
            raise InputError(f"count={count} or batch={batch} is too small; write 1 or more")
        if last == "drop" and count < batch:
            raise InputError(f"batch={batch} is more than the {count} samples; write {count} or less")
        self.count, self.batch, self.seed = count, batch, seed
        self.batches = count // batch if last == "drop" else -(-count // batch)  # per epoch

    def batch_at(self, step: int) -> BatchIndices:
        epoch, index = _epoch_and_index(step, self.batches)
        order = permutation(self.seed, epoch, self.count)
        return BatchIndices(epoch, order[index * self.batch : (index + 1) * self.batch])


class ContiguousBatchPlan:
    """Batches of `batch` samples each; every sample continues the sample in the same row of the batch before.

    The samples are divided into `batch` lanes of equal length, and up to batch - 1 samples at the end are left out.  An
    epoch visits the samples of each lane in order.
    """

    def __init__(self, count: int, batch: int) -> None:
        if batch < 1 or count < batch:
            raise InputError(f"batch={batch} does not fit {count} samples; write 1 to {count}")
        self.batch, self.batches = batch, count // batch

    def batch_at(self, step: int) -> BatchIndices:
        epoch, index = _epoch_and_index(step, self.batches)
        return BatchIndices(epoch, np.arange(self.batch, dtype=np.int64) * self.batches + index)


class BucketBatchPlan:
    """Batches of samples with similar lengths, which need little padding.

    `lengths` has shape (samples,), or (samples, texts) if a sample has several texts. A batch holds at most `batch`
    samples and at most `max_tokens` tokens, including padding; the tokens of a batch of pairs are counted as
    samples × (longest source + longest target). In each epoch the samples are sorted by length, with samples of equal
    length in random order, and cut into batches; then the batches are shuffled.
    """

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
            raise InputError(
                f"lengths of shape {self.lengths.shape} cannot be used; "
                f"give at least one length, in the shape (samples,) or (samples, texts)"
            )
        if (max_tokens is None and batch is None) or (batch is not None and batch < 1):
            raise InputError(
                f"batch={batch} and max_tokens={max_tokens} set no batch size; set at least one of them to 1 or more"
            )
        self.seed, self.max_tokens, self.batch = seed, max_tokens, batch
        self._boundaries = self._batch_boundaries()
        self.batches = len(self._boundaries) - 1  # per epoch
        self._order_cache: dict[int, NDArray[np.int64]] = {}

    def batch_at(self, step: int) -> BatchIndices:
        epoch, index = _epoch_and_index(step, self.batches)
        number = int(permutation(self.seed, epoch, self.batches, "batches")[index])
        return BatchIndices(epoch, self._sorted_samples(epoch)[self._boundaries[number] : self._boundaries[number + 1]])

    def _sorted_samples(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of all samples sorted by length; samples of equal length are in random order."""
        if epoch not in self._order_cache:
            while len(self._order_cache) >= MAX_CACHED_EPOCHS:
                del self._order_cache[next(iter(self._order_cache))]
            tie_breaks = random_uint64(self.seed, epoch, len(self.lengths))
            order = np.lexsort((tie_breaks, *self.lengths.T)).astype(np.int64)
            order.setflags(write=False)
            self._order_cache[epoch] = order
        return self._order_cache[epoch]

    def _batch_boundaries(self) -> list[int]:
        """Return the offset of each batch in the sorted samples, and the end of the last batch.

        They are the same in all epochs, because the sorted lengths are.
        """
        max_samples, max_tokens = self.batch or len(self.lengths), self.max_tokens
        order = np.lexsort(tuple(self.lengths.T))
        boundaries, widths = [0], [0] * self.lengths.shape[1]
        for index, lengths in enumerate(self.lengths[order].tolist()):
            if max_tokens is not None and sum(lengths) > max_tokens:
                excess = f"sample {order[index]} has {sum(lengths)} tokens, more than max_tokens={max_tokens}"
                raise InputError(f"{excess}; raise max_tokens, or remove long samples")
            widened = list(map(max, widths, lengths))
            count = index - boundaries[-1] + 1
            if count > max_samples or (max_tokens is not None and count * sum(widened) > max_tokens):
                boundaries.append(index)
                widened = lengths
            widths = widened
        return [*boundaries, len(self.lengths)]


def _epoch_and_index(step: int, batches: int) -> tuple[int, int]:
    if step < 0:
        raise InputError(f"step={step} is negative; the first step is 0")
    return divmod(step, batches)


# -- the order of samples ----------------------------------------------------------------------------------------------
# Random numbers come from Philox, a counter-based generator (Salmon et al. 2011).  Only its raw 64-bit integers are
# used, because numpy guarantees that they never change, which it does not for `Generator.permutation`.

# Each purpose has its own random numbers, so that a new purpose never changes the numbers of the others.
PURPOSES = {"samples": 0, "offset": 1, "batches": 2, "augment": 3, "holdout": 4, "blocks": 5}
SEED_LIMIT = 2**64


def random_uint64(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.uint64]:
    """Return `count` random 64-bit integers, which depend only on (seed, epoch) and `purpose`, a key of PURPOSES."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < SEED_LIMIT:
            raise InputError(f"{name}={value} is out of range; write a whole number from 0 to 2**64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    # Philox counts up in the low words of its 256-bit counter and never reaches the highest, which holds the purpose.
    counter = np.array([0, 0, 0, PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.int64]:
    """Return a random permutation of 0 … count − 1 for this epoch; the array is cached and therefore read-only."""
    order = np.argsort(random_uint64(seed, epoch, count, purpose), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


T = TypeVar("T")
WORKER_GRACE_SECONDS = 30  # from SIGTERM to the end of a worker that is not ended by its main process


class BatchLoader(Generic[T]):
    """Iterate over `make_batch(plan.batch_at(step))` for step = start, start + 1, … until `stop`, or without end.

    With workers=0 batches are made in this process; otherwise worker processes make them ahead of time. The batches are
    the same, because a batch depends on its step alone. Workers end when the iterator is exhausted, closed or
    garbage-collected.
    """

    def __init__(
        self,
        plan: BatchPlan,
        make_batch: Callable[[BatchIndices], T],
        *,
        start: int = 0,
        stop: int | None = None,
        workers: int = 0,
    ) -> None:
        if workers < 0 or start < 0:
            raise InputError(f"workers={workers} or start={start} is negative; write 0 or more")
        self.plan, self.make_batch, self.start, self.stop, self.workers = plan, make_batch, start, stop, workers

    def __iter__(self) -> Iterator[T]:
        return self._iterate_workers() if self.workers else map(self._make_step, self._steps())

    def _steps(self) -> Iterable[int]:
        return count(self.start) if self.stop is None else range(self.start, self.stop)

    def _make_step(self, step: int) -> T:
        return self.make_batch(self.plan.batch_at(step))

    def _iterate_workers(self) -> Iterator[T]:
        batches = self._start_workers()
        try:
            for batch in batches:
                if isinstance(batch, MonoblockError):
                    raise batch
                yield batch
        finally:
            del batches  # end the worker processes here, not at the next garbage collection

    def _start_workers(self) -> Iterator[Any]:
        import torch
        from torch.utils.data import DataLoader

        with warnings.catch_warnings():
            # Python 3.12 warns about forking a process that has threads, but workers need no lock that a thread may
            # hold. PyTorch warns about more workers than cores, which is the user's choice.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            return iter(
                DataLoader(
                    _StepDataset(self._make_step),  # type: ignore[arg-type]
                    batch_size=None,
                    sampler=self._steps(),
                    num_workers=self.workers,
                    # On systems without fork, `make_batch` must be picklable.
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                    collate_fn=_identity,
                    worker_init_fn=_outlive_signals,
                    # Otherwise DataLoader draws an unused base seed from the global generator.
                    generator=torch.Generator().manual_seed(0),
                )
            )


class _StepDataset:
    """A dataset whose item `step` is the batch of that step, or the error for the main process to raise.

    If a worker raised it, PyTorch would wrap it in an exception with a long traceback.
    """

    def __init__(self, make_step: Callable[[int], Any]) -> None:
        self.make_step = make_step

    def __getitem__(self, step: int) -> Any:
        try:
            return self.make_step(step)
        except MonoblockError as error:
            return error


def _identity(batch: Any) -> Any:
    return batch


def _outlive_signals(worker: int) -> None:
    """Let only the main process handle Ctrl-C and SIGTERM, which may reach every process of a terminal or a job.

    The main process ends its workers when it has saved. After SIGTERM, a worker also ends by itself after a while.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(WORKER_GRACE_SECONDS)
