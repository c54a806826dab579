"""Batches made ahead of time, in order, by any number of processes."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from monoblock.data.batches import Batch, Plan
from monoblock.errors import InputError, MonoblockError

T = TypeVar("T")


class Loader(Generic[T]):
    """`make(plan.at(step))` for step = start, start + 1, … up to before `stop`, or for ever.

    With workers = 0 everything happens in this process; otherwise that many make batches ahead of time.  What comes out
    is the same, because a batch depends on its step alone.  Processes end with the iterator: when it is exhausted,
    closed or forgotten.
    """

    def __init__(
        self,
        plan: Plan,
        make: Callable[[Batch], T],
        *,
        start: int = 0,
        stop: int | None = None,
        workers: int = 0,
    ) -> None:
        if workers < 0 or start < 0:
            raise InputError(f"workers={workers} and start={start} cannot be; write 0 or more")
        self.plan, self.make, self.start, self.stop, self.workers = plan, make, start, stop, workers

    def __iter__(self) -> Iterator[T]:
        return self._ahead() if self.workers else map(self._made, self._steps())

    def _steps(self) -> Iterator[int]:
        return iter(count(self.start) if self.stop is None else range(self.start, self.stop))

    def _made(self, step: int) -> T:
        return self.make(self.plan.at(step))

    def _ahead(self) -> Iterator[T]:
        batches = self._processes()
        try:
            for made in batches:
                if isinstance(made, _Failed):
                    raise made.error
                yield made
        finally:
            del batches  # its processes end here, not when the collector comes round

    def _processes(self) -> Iterator[Any]:
        import torch
        from torch.utils.data import DataLoader

        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads; a worker only computes and answers, and takes none of their
            # locks.  The library warns of more workers than cores; how many there are is for the user to say.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            return iter(
                DataLoader(
                    _Steps(self._made),  # type: ignore[arg-type]
                    batch_size=None,
                    sampler=_Endless(self._steps),
                    num_workers=self.workers,
                    # Elsewhere `make` must be picklable; a fork takes any function as it is.
                    multiprocessing_context="fork" if sys.platform == "linux" else None,
                    collate_fn=_as_it_is,
                    worker_init_fn=_stay_out_of_the_way,
                    # Its own, or the library would draw seeds that nobody uses from the global one.
                    generator=torch.Generator().manual_seed(0),
                )
            )


class _Failed:
    """One of our errors on its way to the user: the library would wrap it in a traceback of many lines."""

    def __init__(self, error: MonoblockError) -> None:
        self.error = error


class _Steps:
    """A dataset whose items are the batches of steps."""

    def __init__(self, made: Callable[[int], Any]) -> None:
        self.made = made

    def __getitem__(self, step: int) -> Any:
        try:
            return self.made(step)
        except MonoblockError as error:
            return _Failed(error)


class _Endless:
    """A sampler that gives step numbers."""

    def __init__(self, steps: Callable[[], Iterator[int]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return self.steps()


def _as_it_is(made: Any) -> Any:
    return made


def _stay_out_of_the_way(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal; it is for the one that trains to answer, after saving.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
