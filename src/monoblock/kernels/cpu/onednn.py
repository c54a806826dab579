"""oneDNN, the library torch uses for matrix products and LSTMs on a CPU: where it supports a dtype.

On ARM processors torch finds out too late.  The first linear layer in bfloat16 on a processor without instructions for
it prints a warning and switches oneDNN off in the whole process, after which fp32 products are rounded differently; an
LSTM in 16 bits raises a RuntimeError.  So monoblock switches oneDNN off beforehand.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

IS_ARM = platform.machine() in ("aarch64", "arm64")
HALF_DTYPES = (torch.bfloat16, torch.float16)


def supports_products(dtype: torch.dtype) -> bool:
    """Return whether torch can multiply matrices of this dtype by oneDNN on this processor."""
    return not IS_ARM or dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def set_enabled(is_enabled: bool) -> None:
    """Let torch use oneDNN in this process, or not."""
    torch.backends.mkldnn.enabled = is_enabled  # type: ignore[assignment]  # torch declares a descriptor


@contextmanager
def disabled_for_lstm(dtype: torch.dtype) -> Iterator[None]:
    """Run an LSTM of this dtype without oneDNN where oneDNN does not support it."""
    if not (IS_ARM and dtype in HALF_DTYPES and torch.backends.mkldnn.enabled):
        yield
        return
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(True)
