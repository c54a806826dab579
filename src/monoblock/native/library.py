"""The C++ kernels beside this file, compiled by the machine's own compiler when they are first asked for.

The library is kept in the user's cache folder under a name that tells source, torch, compiler and processor, so it is
made once.  Where there is no compiler, `load` says why, and everything runs the plain way.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
FIRST = "step.cpp"  # makes the Plan known that others are given
SOURCES = sorted(FOLDER.glob("*.cpp"), key=lambda file: (file.name != FIRST, file.name))
HEADERS = sorted(FOLDER.glob("*.h"))
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")
PATIENCE = 300  # seconds for the compiler


class Kernels(NamedTuple):
    ready: bool
    reason: str = ""  # why not


@functools.cache
def load() -> Kernels:
    """Compile if need be (half a minute, once a machine); there are torch.ops.monoblock.* and a Plan then."""
    compiler = find_compiler()
    if compiler is None:
        return Kernels(False, f"no C++ compiler here (looked for {', '.join(COMPILERS)}), so weights are widened first")
    try:
        torch.ops.load_library(str(_library(compiler)))
    except (ImportError, OSError, subprocess.SubprocessError) as problem:
        said = getattr(problem, "stderr", None) or str(problem)
        line = next((line for line in str(said).splitlines() if "error" in line), str(said).strip().split("\n")[0])
        return Kernels(False, f"{Path(compiler).name} could not build the kernels ({line.strip()[:120]})")
    for name in ("dense", "int8", "int4"):
        torch.library.register_fake(f"monoblock::{name}", _shape)
    return Kernels(True)


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _shape(x: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@functools.cache
def name() -> str:
    """Which kernels this machine has or would make: what the bits of a training step hang on; "" without a compiler."""
    compiler = find_compiler()
    broken = load.cache_info().currsize > 0 and not load().ready
    return "" if compiler is None or broken else f"kernels-{_key(_command(compiler))}"


def _command(compiler: str) -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [compiler, *FLAGS, native]


def _library(compiler: str) -> Path:
    """The compiled kernels, made now if nobody has made them yet."""
    command = _command(compiler)
    place = cache_folder() / f"kernels-{_key(command)}.so"
    if place.is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    headers = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    with _alone(place.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=place.parent) as beside:
        if place.is_file():  # another process was making it
            return place
        made = Path(beside) / place.name
        line = [*command, *headers, "-x", "c++", "-", *libraries, "-o", str(made)]
        whole = "".join(f'#include "{source}"\n' for source in SOURCES)  # as one, which is sooner than one by one
        subprocess.run(line, input=whole, check=True, capture_output=True, text=True, timeout=PATIENCE)
        os.replace(made, place)
    return place


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time: two that compile the same file only hold each other up."""
    import fcntl  # not on Windows, where no compiler of ours is found either

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "monoblock"


def _key(command: list[str]) -> str:
    """What the library depends on; code for this very processor must not be found by another one that shares a home."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, text=True, timeout=PATIENCE)
    sources = [file.read_text(encoding="utf-8") for file in SOURCES + HEADERS]
    parts = [*sources, torch.__version__, *command, version.stdout, _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part"))}))
