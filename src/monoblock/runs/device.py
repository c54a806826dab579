"""The device and the dtype of a model that is run, where the user names none."""

from __future__ import annotations

from typing import NamedTuple

import torch

from monoblock.errors import ConfigError
from monoblock.training.runtime import check_device

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class DefaultChoice(NamedTuple):
    value: str
    why: str


def choose_device() -> DefaultChoice:
    """Return the default device and the reason for it."""
    if torch.cuda.is_available():
        return DefaultChoice("cuda", f"a CUDA device is available: {torch.cuda.get_device_name()}")
    if torch.version.cuda is None:
        return DefaultChoice("cpu", "this build of torch has no CUDA support")
    return DefaultChoice("cpu", "torch was built with CUDA but finds no device")


def choose_dtype(device: str) -> DefaultChoice:
    """Return the default dtype on a device and the reason for it."""
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return DefaultChoice(
            "bfloat16", "this GPU supports it; it needs half the memory of float32, and no loss scaling as float16 does"
        )
    if device == "cuda":
        return DefaultChoice("float32", "this GPU does not support bfloat16, and float16 would need loss scaling")
    return DefaultChoice("float32", f"lower precision is rarely faster on {device}, and float32 is more accurate")


def resolve_device(device: str | None, dtype: str | None) -> tuple[str, torch.dtype]:
    """Return the given device and torch dtype, or the defaults for None."""
    device = device or choose_device().value
    check_device(device, "--device ", "cpu or cuda")
    name = dtype or choose_dtype(device.partition(":")[0]).value
    if name not in {*DTYPES, *DTYPES.values()}:
        raise ConfigError(f"--dtype {name} is not a dtype for weights; write one of {', '.join(DTYPES)}")
    return device, getattr(torch, DTYPES.get(name, name))
