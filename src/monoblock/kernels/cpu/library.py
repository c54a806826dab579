"""Compile and load the C++ kernels of this folder on first use.

The compiled library is stored in the user's cache folder under a hash of sources, torch version, compiler and
processor, so it is compiled only once; a stored library that is damaged, or that another user can have written, is
compiled again.  Without a compiler `load_kernels` returns the reason, and torch computes everything.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.kernels.cpu import library_cache

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = SOURCE_FOLDER / "operators.cpp"  # registers all operators; the headers hold them
SOURCES = [MAIN_SOURCE, *sorted(SOURCE_FOLDER.rglob("*.h"))]
COMPILERS = ("g++", "clang++", "c++")
COMPILER_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
COMPILER_TIMEOUT = 300  # seconds
VERSION_TIMEOUT = 30
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
    stored = library_cache.find_library(name)
    if stored is not None:
        return stored
    library = library_cache.make_library_folder() / name
    parts = Path(torch.__file__).parent
    headers = [f"-I{folder}" for folder in (SOURCE_FOLDER, parts / "include", parts / "include/torch/csrc/api/include")]
    libraries = [f"-L{parts / 'lib'}", "-lc10", "-ltorch_cpu"]
    import fcntl  # not available on Windows, where none of COMPILERS is expected

    lock = library.with_suffix(".lock").open("w")  # so that only one process compiles at a time
    with lock, tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library_cache.is_intact(library):  # another process has compiled it
            return library
        output = Path(folder) / name
        _run([*command, *headers, str(MAIN_SOURCE), *libraries, "-o", str(output)], COMPILER_TIMEOUT)
        library_cache.store_library(output, library)
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


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part"))}))
