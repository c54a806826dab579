"""Compile and load the C++ kernels of this folder on first use; switch oneDNN off where it is slow.

The compiled library is stored in the user's cache folder under a hash of sources, torch version, compiler and
processor, so it is compiled only once.  A stored library is loaded only if no other user can have written it, and if it
has the SHA-256 in the file beside it: loading a truncated library ends the process.  Without a compiler `load_kernels`
returns the reason, and torch computes everything.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = SOURCE_FOLDER / "operators.cpp"  # registers all operators; the headers hold them
SOURCES = [MAIN_SOURCE, *sorted(SOURCE_FOLDER.rglob("*.h"))]
COMPILERS = ("g++", "clang++", "c++")
COMPILER_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
COMPILER_TIMEOUT = 300  # seconds
VERSION_TIMEOUT = 30
CPUINFO = Path("/proc/cpuinfo")
ARM_PARTS = {  # "CPU part" of /proc/cpuinfo -> name
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
ROOT = 0  # the user id that may replace any file anyway
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOADING = threading.Lock()


class KernelStatus(NamedTuple):
    is_ready: bool
    reason: str = ""  # why they are not ready


@functools.cache
def load_kernels() -> KernelStatus:
    """Load the C++ kernels as torch.ops.monoblock.* and torch.classes.monoblock.*; return whether they are ready.

    They are compiled the first time, which takes half a minute.
    """
    compiler = find_compiler()
    if compiler is None:
        problem = f"no C++ compiler was found ({', '.join(COMPILERS)}), so weights are dequantized first"
        return KernelStatus(False, problem)
    try:
        with _LOADING:  # functools.cache may run this in several threads at once
            _load_library(_build_library(compiler))
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        message = str(getattr(error, "stderr", None) or error)
        line = next((line for line in message.splitlines() if "error" in line), message.strip().split("\n")[0])
        return KernelStatus(False, f"{Path(compiler).name} could not build the kernels ({line.strip()[:120]})")
    return KernelStatus(True)


@functools.cache  # the operators of a library are registered once
def _load_library(library: Path) -> None:
    torch.ops.load_library(str(library))
    torch.library.register_fake("monoblock::linear", _fake_product)


@functools.cache
def has_matrix_tiles() -> bool:
    """Return whether the kernels can use the processor's matrix tiles (AMX), which make products of many rows fast."""
    return load_kernels().is_ready and bool(torch.ops.monoblock.can_use_tiles())


@functools.cache
def can_multiply_many_rows(group: int) -> bool:
    """Return whether the kernels multiply many rows by quantized weights in groups of this size.

    Elsewhere it is faster to dequantize the weights first.
    """
    return load_kernels().is_ready and bool(torch.ops.monoblock.can_multiply_many_rows(group))


def find_compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _fake_product(x: Tensor, weight: Tensor, *others: Tensor | int | None, **options: Any) -> Tensor:
    devices = {t.device for t in (x, weight, *others, *options.values()) if isinstance(t, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {' and '.join(sorted(map(str, devices)))}; move them to one device")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@functools.cache
def kernels_id() -> str:
    """Return an identifier of the C++ kernels of this machine, or "" if there are none.

    The exact results of training depend on these kernels.
    """
    compiler = find_compiler()
    is_broken = load_kernels.cache_info().currsize > 0 and not load_kernels().is_ready
    if compiler is None or is_broken:
        return ""
    try:
        return f"kernels-{_build_hash(_compiler_command(compiler))}"
    except (OSError, subprocess.SubprocessError):  # nothing can be built with this compiler
        return ""


def _compiler_command(compiler: str) -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [compiler, *COMPILER_FLAGS, native]


def _build_library(compiler: str) -> Path:
    """Return the path of the compiled kernels, compiling them if needed."""
    command = _compiler_command(compiler)
    name = f"kernels-{_build_hash(command)}.so"
    stored = find_library(name)
    if stored is not None:
        return stored
    library = make_library_folder() / name
    parts = Path(torch.__file__).parent
    headers = [f"-I{folder}" for folder in (SOURCE_FOLDER, parts / "include", parts / "include/torch/csrc/api/include")]
    libraries = [f"-L{parts / 'lib'}", "-lc10", "-ltorch_cpu"]
    import fcntl  # not available on Windows, where none of COMPILERS is expected

    lock = library.with_suffix(".lock").open("w")  # so that only one process compiles at a time
    with lock, tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_intact(library):  # another process has compiled it
            return library
        output = Path(folder) / name
        _run([*command, *headers, str(MAIN_SOURCE), *libraries, "-o", str(output)], COMPILER_TIMEOUT)
        store_library(output, library)
    return library


def _run(command: list[str], timeout: int) -> str:
    """Return what a command writes; raise OSError or SubprocessError if it fails."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=timeout)
    return done.stdout


def _build_hash(command: list[str]) -> str:
    """Hash all that the compiled library depends on.

    This includes the processor, because machines that share a home folder may have different ones. Raise OSError or
    SubprocessError if the compiler does not tell its version.
    """
    version = _run([command[0], "--version"], VERSION_TIMEOUT)
    sources = [file.read_text(encoding="utf-8") for file in SOURCES]
    parts = [*sources, torch.__version__, *command, version, _processor_features()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """Return the name of this machine's processor, for tables of measurements, or "CPU" if it is unknown."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _cpuinfo())}
    return fields.get("model name") or ARM_PARTS.get(fields.get("CPU part", "")) or "CPU"


def _processor_features() -> str:
    features = sorted({line for line in _cpuinfo() if line.startswith(("flags", "Features", "CPU part"))})
    return "\n".join(features) or platform.processor()


def _cpuinfo() -> list[str]:
    return CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []


# -- stored libraries -----------------------------------------------------------------------------------------------


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


# -- oneDNN ---------------------------------------------------------------------------------------------------------
# On ARM processors without instructions for bfloat16, torch's other library (OpenBLAS) is faster in fp32, and oneDNN
# does not support bfloat16.  There torch prints a warning at the first linear layer in bfloat16 and switches oneDNN off
# in the whole process, after which fp32 products are rounded differently; an LSTM raises a RuntimeError.


@functools.cache
def is_onednn_fast() -> bool:
    """Return whether this processor supports oneDNN in all dtypes and computes with it as fast as without."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return not is_arm or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def enable_onednn(is_enabled: bool) -> None:
    """Let torch use oneDNN in this process, or not."""
    torch.backends.mkldnn.enabled = is_enabled  # type: ignore[assignment]  # torch declares a descriptor


@contextmanager
def without_slow_onednn() -> Iterator[None]:
    """Run the `with` block without oneDNN if `is_onednn_fast()` is False."""
    if torch.compiler.is_compiling() or is_onednn_fast() or not torch.backends.mkldnn.enabled:
        yield
        return
    enable_onednn(False)
    try:
        yield
    finally:
        enable_onednn(True)
