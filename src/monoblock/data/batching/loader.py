"""Load batches ahead of time with any number of worker processes; the batches come in the order of their steps."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any, Generic, TypeVar

from monoblock.data.batching.plans import BatchIndices, BatchPlan
from monoblock.errors import InputError, MonoblockError

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

    def _steps(self) -> Iterator[int]:
        return iter(count(self.start) if self.stop is None else range(self.start, self.stop))

    def _make_step(self, step: int) -> T:
        return self.make_batch(self.plan.batch_at(step))

    def _iterate_workers(self) -> Iterator[T]:
        batches = self._start_workers()
        try:
            for batch in batches:
                if isinstance(batch, _WorkerError):
                    raise batch.error
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
                    sampler=_StepSampler(self._steps),
                    num_workers=self.workers,
                    # On systems without fork, `make_batch` must be picklable.
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                    collate_fn=_identity,
                    worker_init_fn=_outlive_signals,
                    # Otherwise DataLoader draws an unused base seed from the global generator.
                    generator=torch.Generator().manual_seed(0),
                )
            )


class _WorkerError:
    """A MonoblockError that a worker returns to the main process.

    If the worker raised it, PyTorch would wrap it in an exception with a long traceback.
    """

    def __init__(self, error: MonoblockError) -> None:
        self.error = error


class _StepDataset:
    """A dataset whose item `step` is the batch of that step."""

    def __init__(self, make_step: Callable[[int], Any]) -> None:
        self.make_step = make_step

    def __getitem__(self, step: int) -> Any:
        try:
            return self.make_step(step)
        except MonoblockError as error:
            return _WorkerError(error)


class _StepSampler:
    """A sampler that yields the steps to load, in order."""

    def __init__(self, steps: Callable[[], Iterator[int]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return self.steps()


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
