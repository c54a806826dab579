"""Measure the time and the memory of the worker and of the processes that it starts, with what Linux has in /proc."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

POLL_SECONDS = 0.005


class Times(NamedTuple):
    """Seconds: on a clock, of processor time, and ready to run while other programs had the processor."""

    clock: float
    cpu: float
    waiting: float

    def __sub__(self, other: Times) -> Times:
        return Times(*(a - b for a, b in zip(self, other, strict=True)))

    @property
    def alone(self) -> float:
        """The time on the clock that it would have taken on an idle machine."""
        return self.clock - self.waiting


class Process:
    """A process that is measured through descriptors that stay open, since the audit hook would see them opened."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        names = ("status", "stat", "schedstat", "clear_refs")
        flags = (os.O_RDONLY, os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)
        self._descriptors = {
            name: os.open(f"/proc/{pid}/{name}", flag | os.O_CLOEXEC) for name, flag in zip(names, flags, strict=True)
        }
        self.base = 0  # bytes: resident at the last `reset`
        self.peak = 0  # bytes: grown since then
        self.cpu = self.waiting = 0.0  # seconds
        self.measure()

    def measure(self) -> bool:
        """Read the times and the largest size; return False if the process has ended, and keep what was read last."""
        fields = self._read("stat").rpartition(b")")[2].split()
        if not fields or fields[0] in (b"Z", b"X"):
            return False
        self.cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        schedule = self._read("schedstat").split()
        self.waiting = int(schedule[1]) * 1e-9 if schedule else self.waiting
        self.peak = max(self.peak, self._size(b"VmHWM") - self.base)
        return True

    def reset(self) -> None:
        """Measure the growth of memory from now on."""
        try:
            os.write(self._descriptors["clear_refs"], b"5")
        except OSError:  # it has ended
            return
        self.base, self.peak = self._size(b"VmRSS"), 0

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _size(self, name: bytes) -> int:
        line = next((row for row in self._read("status").splitlines() if row.startswith(name)), None)
        return int(line.split()[1]) * 1024 if line else 0

    def _read(self, name: str) -> bytes:
        try:
            return os.pread(self._descriptors[name], 8192, 0)
        except OSError:  # it has ended
            return b""


class ProcessGroup:
    """This process and those that it starts, measured every few milliseconds while a case is read.

    Of a process that a former case started, only its growth counts; of a new one, its whole size. If `fork_program` is
    set, a process is forked from this one, which has imported torch, and calls `fork_program(command, env, may_start)`
    instead of its program; of it, only the growth counts.
    """

    fork_program: Callable[[list[str], dict[str, str], int], None] | None = None

    def __init__(self, pause_watch: Callable[[], AbstractContextManager[None]]) -> None:
        self.own = Process(os.getpid())
        self.children: list[Process] = []
        self._is_polling = threading.Event()
        self._lock = threading.Lock()
        group = self

        class Popen(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **options: Any) -> None:
                if group.fork_program is None:
                    super().__init__(*args, **options)
                    with pause_watch():
                        group._add(self.pid)
                    return
                may_start, start = os.pipe()
                fork = partial(group.fork_program, list(args[0]), options["env"], may_start)
                super().__init__(*args, **options, preexec_fn=fork)
                with pause_watch():
                    group._add(self.pid, is_forked=True)
                os.write(start, b"1")
                os.close(may_start)
                os.close(start)

        subprocess.Popen = Popen  # type: ignore[misc]
        threading.Thread(target=self._poll, daemon=True).start()

    def start(self) -> Times:
        """Forget the processes that have ended, measure memory from now on, and return the times now."""
        with self._lock:
            running = [child for child in self.children if child.measure()]
            for child in self.children:
                child.reset() if child in running else child.close()
            self.children = running
        self.own.reset()
        if running:
            self._is_polling.set()
        return self._times()

    def stop(self) -> tuple[Times, int, int]:
        """Return the times now, the growth of this process and that of the others, in bytes."""
        self._is_polling.clear()
        times = self._times()
        return times, self.own.peak, sum(child.peak for child in self.children)

    def _times(self) -> Times:
        clock = time.perf_counter()
        with self._lock:
            processes = [self.own, *self.children]
            for process in processes:
                process.measure()
            return Times(clock, sum(row.cpu for row in processes), sum(row.waiting for row in processes))

    def _add(self, pid: int, is_forked: bool = False) -> None:
        process = Process(pid)
        if is_forked:
            process.reset()
        with self._lock:
            self.children.append(process)
        self._is_polling.set()

    def _poll(self) -> None:
        while self._is_polling.wait():
            with self._lock:
                for child in self.children:
                    child.measure()
            time.sleep(POLL_SECONDS)
