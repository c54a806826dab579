"""Folders for compiled libraries: a library is loaded only if no other user can have written it and it is undamaged.

Each library has a file with its SHA-256 beside it, because loading a truncated library ends the process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = 0  # the user id that may replace any file anyway
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def find_library(name: str) -> Path | None:
    """Return the path of a stored library that may be loaded, or None if there is none."""
    libraries = (folder / name for folder in _candidate_folders() if _is_trusted_folder(folder))
    return next((library for library in libraries if is_intact(library)), None)


def make_library_folder() -> Path:
    """Return a folder into which only this user can write: one of the cache, else one that is deleted at the end."""
    for folder in _candidate_folders():
        with suppress(OSError):
            for path in (*reversed(folder.parents), folder):
                if not path.exists():
                    path.mkdir(exist_ok=True, mode=0o700)  # with `parents`, the mode would be that of the last alone
            if _is_trusted_folder(folder) and os.access(folder, os.W_OK):
                return folder
    return Path(_temporary_folder().name)


def store_library(file: Path, library: Path) -> None:
    """Move a file in the folder of `library` to `library`, so that a crash at any time leaves no damaged library.

    The SHA-256 is written last: a library without its SHA-256 is not loaded.
    """
    file.chmod(0o700)
    content = file.read_bytes()
    digest = file.with_name(_digest_file(file).name)
    digest.write_text(hashlib.sha256(content).hexdigest(), encoding="ascii")
    digest.chmod(0o600)
    for path, target in ((file, library), (digest, _digest_file(library))):
        _fsync(path)
        os.replace(path, target)
    _fsync(library.parent)


def is_intact(library: Path) -> bool:
    """Return whether only this user, or root, can have written a library, and whether it has the SHA-256 beside it."""
    content, digest = _read_trusted(library), _read_trusted(_digest_file(library))
    if content is None or digest is None:
        return False
    return hashlib.sha256(content).hexdigest().encode() == digest.strip()


def _digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _candidate_folders() -> Iterator[Path]:
    """Yield folders for libraries, the best first; the name has the id of the user where several users may share it."""
    own_name = f"monoblock-{_user_id()}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # there is neither HOME nor an entry for this user
        if not cache.is_absolute():  # such a value is ignored, as the XDG specification asks
            cache = Path.home() / ".cache"
    if cache.is_absolute():
        yield cache / "monoblock" / "kernels"
        yield cache / own_name / "kernels"
    yield Path(tempfile.gettempdir()) / own_name / "kernels"


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="monoblock-")


def _user_id() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else ROOT


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (_user_id(), ROOT) and not status.st_mode & WRITABLE_BY_OTHERS


def _is_trusted_folder(folder: Path) -> bool:
    """Return whether only this user, or root, can write into a folder, and no other user can replace it by another.

    A group of users is taken to be that of one user, where it can only rename a folder.
    """
    try:
        resolved = folder.resolve()
        above = [parent.stat() for parent in resolved.parents]
        is_own = resolved.is_dir() and _is_trusted(resolved.stat())
    except OSError:
        return False
    is_open = any(one.st_mode & stat.S_IWOTH and not one.st_mode & stat.S_ISVTX for one in above)
    return is_own and not is_open and {one.st_uid for one in above} <= {_user_id(), ROOT}


def _read_trusted(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is missing, no plain file, or another user can have written it."""
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no links, no pipes
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(status.st_mode) and _is_trusted(status) else None
    except OSError:
        return None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
