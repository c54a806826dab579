"""Run the jobs of an experiment, each after the jobs it depends on, in this process or in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

from monoblock.errors import ConfigError, MonoblockError

POLL_SECONDS = 0.2  # how often the messages of other processes are read


class Job(NamedTuple):
    """A module-level function with its arguments; it yields progress messages and writes its results to files."""

    name: str
    run: Callable[..., Iterator[str]]
    args: tuple[Any, ...]
    depends_on: tuple[str, ...] = ()  # names of the jobs that must finish before this one


def run_jobs(jobs: Sequence[Job], processes: int = 1) -> Iterator[str]:
    """Run all jobs, in the given order as far as `depends_on` allows; yield progress messages.

    A job that fails does not stop the others, except those that depend on it.  At the end, ConfigError is raised.
    """
    waiting, done, failures = list(jobs), set[str](), dict[str, str]()

    def finish(job: Job, problem: str | None) -> Iterator[str]:
        """Note how a job has ended; if it failed, take the jobs that depend on it off the list."""
        done.add(job.name)
        if problem is None:
            return
        failures[job.name] = problem
        yield f"{job.name}: failed: {problem}"
        for other in [other for other in waiting if job.name in other.depends_on]:
            if other in waiting:
                waiting.remove(other)
                yield from finish(other, f"it depends on {job.name}, which failed")

    if processes == 1:
        while waiting:
            job = next(job for job in waiting if done.issuperset(job.depends_on))
            waiting.remove(job)
            problem = None
            try:
                yield from job.run(*job.args)
            except MonoblockError as error:
                problem = str(error)
            yield from finish(job, problem)
    else:
        yield from _run_parallel(waiting, done, finish, processes)
    if failures:
        name, problem = next(iter(failures.items()))
        others = f" ({len(failures) - 1} more failed or depend on one that did)" if len(failures) > 1 else ""
        raise ConfigError(f"{name}: {problem}{others}")


def _run_parallel(
    waiting: list[Job], done: set[str], finish: Callable[[Job, str | None], Iterator[str]], processes: int
) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")  # a process that has initialized CUDA cannot be forked
    messages, running = context.SimpleQueue(), dict[Future[str | None], Job]()
    with ProcessPoolExecutor(processes, context, _begin_process, (processes, messages)) as pool:
        try:
            while waiting or running:
                for job in [job for job in waiting if done.issuperset(job.depends_on)][: processes - len(running)]:
                    running[pool.submit(_run_job, job)] = job
                    waiting.remove(job)
                finished = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done
                while not messages.empty():
                    yield messages.get()
                for future in finished:
                    yield from finish(running.pop(future), future.result())
        except BrokenProcessPool:
            raise ConfigError(
                "a process ended without a result: it was killed, or memory was short; finished trials are kept, "
                "and the same command goes on with the others"
            ) from None
        except BaseException:  # also Ctrl-C: what runs now is not waited for, and another Ctrl-C is ignored
            is_main = threading.current_thread() is threading.main_thread()  # only it can have handlers
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if is_main:
                signal.signal(signal.SIGINT, handler)
            raise


# -- in a worker process ----------------------------------------------------------------------------------------------

_messages: SimpleQueue[str] | None = None  # its progress messages to the main process


def _begin_process(processes: int, messages: SimpleQueue[str]) -> None:
    """Give each process an equal share of the cores, and tell it where its messages go.

    The main process ends it after Ctrl-C; if the main process is killed, it exits by itself.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import torch

    global _messages
    _messages = messages
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _end_with_parent() -> None:
    """Exit as soon as the main process ends; the next call repeats the job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: Job) -> str | None:
    """Run a job; return its error message or None."""
    assert _messages is not None
    try:
        for message in job.run(*job.args):
            _messages.put(message)
    except MonoblockError as problem:
        return str(problem)
    return None
