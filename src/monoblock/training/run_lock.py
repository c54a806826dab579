"""A lock on the folder of a run, so that no two processes train in the same folder.

The lock is a file that its process holds with `flock`, which the system releases when the process ends in whatever way.
The file names the process, for the error message, and for file systems without `flock`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monoblock.errors import FileError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "run.lock"
MAX_LOCK_BYTES = 4096
_descriptors: set[int] = set()  # of the locks that this process holds


@contextmanager
def lock_run_folder(folder: Path, *, create: bool = True, is_main: bool = True) -> Iterator[None]:
    """Hold the lock of a run folder; raise FileError if another process holds it.

    create: create the folder if there is none, and delete it at the end if it is still empty; otherwise a missing
        folder is not locked.
    is_main: only the main process of several that train together locks the folder.
    """
    if not is_main or not (create or folder.is_dir()):
        yield
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{folder} cannot be created: {problem.strerror}") from None
    try:
        descriptor = _acquire(folder)
        _descriptors.add(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()  # before the lock is released, so that it is not that of another process
            _descriptors.discard(descriptor)
            os.close(descriptor)
    finally:
        with suppress(OSError):  # it is not empty
            for path in new_folders:
                path.rmdir()


def _acquire(folder: Path) -> int:
    """Return the descriptor of the locked lock file."""
    path = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as problem:
            raise FileError(f"{path} cannot be written: {problem.strerror}") from None
        try:
            is_free = _try_flock(descriptor)
            owner = _read_owner(descriptor)
            if is_free is False or (is_free is None and _is_running(owner)):
                raise FileError(_describe_owner(folder, owner))
            if _is_same_file(descriptor, path):  # its last owner may have deleted it since it was opened
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
                return descriptor
        except OSError as problem:
            os.close(descriptor)
            raise FileError(f"{path} cannot be written: {problem.strerror}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try_flock(descriptor: int) -> bool | None:
    """Lock a file and return whether it was free; return None if the system cannot lock it."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Return what a lock file says about its process; {} if it is damaged or the process is about to write it."""
    try:
        owner = json.loads(os.pread(descriptor, MAX_LOCK_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _describe_owner(folder: Path, owner: dict[str, Any]) -> str:
    process = f"process {owner['pid']}" if owner else "another process"
    if owner and owner.get("host") != platform.node():
        process += f" on {str(owner.get('host'))[:80]}"
    return (
        f"{process} is training in {folder}; wait until it ends, or stop it, or choose another folder with --out "
        "(in Python, out=…)"
    )


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": platform.node(), "boot": _boot_id(), "started": _start_time(os.getpid())}


def _is_running(owner: dict[str, Any]) -> bool:
    """Return whether the process that wrote a lock file still runs on this machine, since the same start of it."""
    if not owner or owner.get("host") != platform.node() or owner.get("boot") != _boot_id():
        return False
    pid = owner["pid"]
    if os.name != "posix" or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return owner.get("started") == _start_time(pid)


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _start_time(pid: int) -> str:
    """Return when a process started, as Linux counts it, so that another process with the same id is recognized."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return ""


def _close_in_child() -> None:
    """Close the locks in a forked process, such as a worker that loads data, which may outlive this one."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
