"""oneDNN, one of the libraries that torch uses for matrix products and LSTMs on a CPU: switch it off where it is slow.

On ARM processors without instructions for bfloat16, torch's other library (OpenBLAS) is faster in fp32, and oneDNN does
not support bfloat16.  There torch prints a warning at the first linear layer in bfloat16 and switches oneDNN off in the
whole process, after which fp32 products are rounded differently; an LSTM raises a RuntimeError.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def is_fast() -> bool:
    """Return whether this processor supports oneDNN in all dtypes and computes with it as fast as without."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return not is_arm or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def set_enabled(is_enabled: bool) -> None:
    """Let torch use oneDNN in this process, or not."""
    torch.backends.mkldnn.enabled = is_enabled  # type: ignore[assignment]  # torch declares a descriptor


@contextmanager
def disabled_where_slow() -> Iterator[None]:
    """Run the `with` block without oneDNN if `is_fast()` is False."""
    if torch.compiler.is_compiling() or is_fast() or not torch.backends.mkldnn.enabled:
        yield
        return
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(True)
