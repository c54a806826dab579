"""Build the C++ kernels with a sanitizer of the compiler, and run Python programs with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from monoblock.kernels.cpu import library

SANITIZERS = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python and torch keep much memory until they end, and a failed allocation is an error that Python reports.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
    # Only races in our own library are reported: Python and torch are built without the sanitizer.
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}
KERNELS_VARIABLE = "MONOBLOCK_SANITIZED_KERNELS"
TESTS = Path(__file__).resolve().parents[2] / "tests"


def build_kernels(kind: str, folder: Path) -> Path:
    """Compile the kernels with a sanitizer, and return the path of the library."""
    compiler = library.find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler was found")
    torch_folder, output = Path(torch.__file__).parent, folder / f"{kind}.so"
    include = torch_folder / "include"
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={kind}", *library.COMPILER_FLAGS[1:], "-march=native"]
    headers = [f"-I{path}" for path in (library.SOURCE_FOLDER, include, include / "torch/csrc/api/include")]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(output)]
    subprocess.run([compiler, *flags, *headers, str(library.MAIN_SOURCE), *libraries], check=True)
    return output


def make_environment(kind: str | None, kernels: Path | None) -> dict[str, str]:
    """Return the environment of a child process that uses sanitized kernels; the usual ones if `kernels` is None."""
    paths = [str(Path(library.__file__).parents[3]), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if kind is None or kernels is None:
        return environment
    # The sanitizer needs the C++ runtime from the start, to follow exceptions.
    preloaded = " ".join(_find_runtime(name) for name in (SANITIZERS[kind], "libstdc++.so"))
    return environment | OPTIONS | {KERNELS_VARIABLE: str(kernels), "LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"}


def _find_runtime(name: str) -> str:
    command = [str(library.find_compiler()), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def use_environment() -> None:
    """In a child process: load the kernels that `make_environment` chose."""
    kernels = os.environ.get(KERNELS_VARIABLE)
    if kernels:
        library._build_library = lambda compiler: Path(kernels)  # type: ignore[assignment]
    status = library.load_kernels()
    if not status.is_ready:
        sys.exit(f"no kernels: {status.reason}")
