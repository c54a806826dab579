"""Faults of a run in several processes: one line that says what happened, and a log of each process in the run folder.

    runs/x/logs/rank-0.log   what libraries in C++ write, and the traceback of an error
    runs/x/logs/rank-1.log   everything that process 1 prints, and so on

A log is appended to when the run is resumed.
"""

from __future__ import annotations

import faulthandler
import io
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from monoblock.errors import FileError, MonoblockError
from monoblock.untrusted_files import open_to_write

LOGS_FOLDER = "logs"
END = "--- end: "  # begins the last line of a log
FILE_TIME_ERROR = 1.0  # seconds by which the time of a file may be behind the clock; it is that of the last tick
LAUNCHER_POLL_SECONDS = 1.0
TIMEOUT_WORDS = ("timed out", "timeout")
CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket")
MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory")


class ProcessError(MonoblockError):
    """A process ran out of memory, or timed out waiting for another one."""


def translate_fault(problem: Exception, rank: int) -> MonoblockError | None:
    """Return the error to report for one that PyTorch raised, or None if it says enough itself."""
    text = str(problem).lower()
    is_runtime = isinstance(problem, RuntimeError) and not isinstance(problem, MonoblockError)
    if isinstance(problem, MemoryError) or (is_runtime and any(words in text for words in MEMORY_WORDS)):
        return ProcessError(
            f"process {rank} ran out of memory; write a larger train.accumulate and a smaller train.batch, or a "
            f"smaller model, and continue with --resume"
        )
    if not is_lost_connection(problem):
        return None
    if any(words in text for words in TIMEOUT_WORDS):
        return ProcessError(
            f"process {rank} waited longer than parallel.timeout for another process, which hangs or has died; "
            f"see the folder {LOGS_FOLDER} of the run, and continue with --resume"
        )
    return ProcessError(
        f"process {rank} lost the connection to another process, which has ended; continue with --resume"
    )


def is_lost_connection(problem: Exception) -> bool:
    """Return whether an error says that another process cannot be reached."""
    if isinstance(problem, dist.DistError):
        return not isinstance(problem, torch.OutOfMemoryError)
    return type(problem) is RuntimeError and any(words in str(problem).lower() for words in CONNECTION_WORDS)


# -- logs ---------------------------------------------------------------------------------------------------------


def log_path(folder: Path, rank: int) -> Path:
    return folder / LOGS_FOLDER / f"rank-{rank}.log"


@contextmanager
def log_output(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], *, create: bool = True
) -> Iterator[TextIO | None]:
    """Write the output of this process to its log in a run folder, if torchrun has started it; the block gets the log.

    What Python prints in the main process still goes to the terminal. After the `with` block, all processes print to
    the terminal again. The last line of the log says how the block ended.

    words: the command line, for the first line of the log.
    create: create the run folder; otherwise, if there is none, the output of the other processes is dropped.
    """
    if "LOCAL_RANK" not in environment:
        yield None
        return
    rank = int(environment["RANK"])
    log = _open_log(log_path(folder, rank) if create or folder.is_dir() else Path(os.devnull))
    start = f"restart {environment['TORCHELASTIC_RESTART_COUNT']}, " if is_restarted(environment) else ""
    place = f"{platform.node()}, process id {os.getpid()}, {_launcher_words(os.getppid())}"
    place += f", {start}rank {rank} of {environment['WORLD_SIZE']}"
    log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {place}: {shlex.join(words)}\n")
    terminal = [os.fdopen(os.dup(stream.fileno()), "w", buffering=1) for stream in (sys.stdout, sys.stderr)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log.fileno(), stream.fileno())
    if rank == 0:
        sys.stdout, sys.stderr = terminal
    faulthandler.enable(log)
    try:
        yield log
        log.write(f"{END}completed\n")
    except Exception as problem:
        log.write(f"{END}{problem}\n")
        raise
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = terminal


def _open_log(path: Path) -> TextIO:
    """Open a log, or os.devnull if it cannot be written to, which the run reports when it writes its first files."""
    with suppress(OSError, FileError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_symlink():
            file = open_to_write(path, "append")
            return io.TextIOWrapper(file, encoding="utf-8", errors="replace", line_buffering=True)
    return open(os.devnull, "w", encoding="utf-8")


def has_ended(folder: Path, launcher: int, since: float) -> bool | None:
    """Return whether a process that a launcher of this machine started has written how it ended to its log.

    Return None if no process of the launcher has written to a log since a time: it did not start.

    launcher: the process id of the launcher; other machines may write logs in the same folder.
    """
    start = (f" {platform.node()}, process id ", f", {_launcher_words(launcher)}, ")
    ends = []
    for path in log_path(folder, 0).parent.glob("rank-*.log"):
        if path.is_file() and path.stat().st_mtime >= since - FILE_TIME_ERROR:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            starts = [n for n, line in enumerate(lines) if line.startswith("--- ") and all(w in line for w in start)]
            ends += [any(line.startswith(END) for line in lines[n:]) for n in starts[-1:]]
    return any(ends) if ends else None


def _launcher_words(launcher: int) -> str:
    return f"started by process {launcher}"


# -- torchrun -----------------------------------------------------------------------------------------------------


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process again after a failure (`--max-restarts`)."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def stop_with_launcher(environment: Mapping[str, str]) -> None:
    """Let this process receive SIGTERM, after which it saves and stops, if the torchrun that started it is killed."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    if "LOCAL_RANK" in environment:
        threading.Thread(target=watch, daemon=True).start()
