"""The parts of an experiment, in the order their needs allow: one after the other, or several processes at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

from monoblock.errors import ConfigError, MonoblockError


class Job(NamedTuple):
    """A function of a module that says what it does; all it makes lies in files."""

    name: str
    run: Callable[..., Iterator[str]]
    given: tuple[Any, ...]
    after: tuple[str, ...] = ()  # the names of what must be done before


def carried_out(jobs: Sequence[Job], processes: int = 1) -> Iterator[str]:
    """Do every job; what is yielded is to be told.  Those named first are begun first."""
    if processes == 1:
        for job in _in_order(jobs):
            yield from job.run(*job.given)
        return
    context = multiprocessing.get_context("spawn")  # a process that has seen a GPU cannot be forked
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_share, initargs=(processes,)) as pool:
        try:
            yield from _side_by_side(list(jobs), pool, processes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_order(jobs: Sequence[Job]) -> Iterator[Job]:
    left, done = list(jobs), set[str]()
    while left:
        job = next(job for job in left if done.issuperset(job.after))
        yield job
        left.remove(job)
        done.add(job.name)


def _side_by_side(left: list[Job], pool: ProcessPoolExecutor, processes: int) -> Iterator[str]:
    done: set[str] = set()
    running: dict[Future[tuple[list[str], str | None]], Job] = {}
    while left or running:
        for job in [job for job in left if done.issuperset(job.after)][: processes - len(running)]:
            running[pool.submit(_told, job)] = job
            left.remove(job)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            said, problem = future.result()
            last = said[-1] if said else "taken as it is"
            yield last if last.startswith(job.name) else f"{job.name}: {last}"
            if problem is not None:
                raise ConfigError(f"{job.name}: {problem}")
            done.add(job.name)


def _told(job: Job) -> tuple[list[str], str | None]:
    """In a process of its own: what the job said, and what went wrong in one line."""
    said: list[str] = []
    try:
        said.extend(job.run(*job.given))
    except MonoblockError as problem:
        return said, str(problem)
    return said, None


def _share(processes: int) -> None:
    """Each process its part of the cores."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
