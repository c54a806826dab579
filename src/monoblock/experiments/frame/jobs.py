"""Run the jobs of an experiment, each after the jobs it depends on, in this process or in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

from monoblock.errors import ConfigError, MonoblockError


class Job(NamedTuple):
    """A module-level function with its arguments; it yields progress messages and writes its results to files."""

    name: str
    run: Callable[..., Iterator[str]]
    args: tuple[Any, ...]
    depends_on: tuple[str, ...] = ()  # names of the jobs that must finish before this one


def run_jobs(jobs: Sequence[Job], processes: int = 1) -> Iterator[str]:
    """Run all jobs, in the given order as far as `depends_on` allows; yield progress messages."""
    if processes == 1:
        for job in _topological_order(jobs):
            yield from job.run(*job.args)
        return
    context = multiprocessing.get_context("spawn")  # a process that has initialized CUDA cannot be forked
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_limit_threads, initargs=(processes,)) as pool:
        try:
            yield from _run_parallel(list(jobs), pool, processes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _topological_order(jobs: Sequence[Job]) -> Iterator[Job]:
    waiting, done = list(jobs), set[str]()
    while waiting:
        job = next(job for job in waiting if done.issuperset(job.depends_on))
        yield job
        waiting.remove(job)
        done.add(job.name)


def _run_parallel(waiting: list[Job], pool: ProcessPoolExecutor, processes: int) -> Iterator[str]:
    done: set[str] = set()
    running: dict[Future[tuple[list[str], str | None]], Job] = {}
    while waiting or running:
        for job in [job for job in waiting if done.issuperset(job.depends_on)][: processes - len(running)]:
            running[pool.submit(_run_job, job)] = job
            waiting.remove(job)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            messages, problem = future.result()
            last = messages[-1] if messages else "already done"
            yield last if last.startswith(job.name) else f"{job.name}: {last}"
            if problem is not None:
                raise ConfigError(f"{job.name}: {problem}")
            done.add(job.name)


def _run_job(job: Job) -> tuple[list[str], str | None]:
    """Run a job in a worker process; return its progress messages, and its error message or None."""
    messages: list[str] = []
    try:
        messages.extend(job.run(*job.args))
    except MonoblockError as problem:
        return messages, str(problem)
    return messages, None


def _limit_threads(processes: int) -> None:
    """Give each process an equal share of the cores."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
