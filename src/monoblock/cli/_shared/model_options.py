"""Choose a device and a dtype, and load a model folder: shared by every verb that runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from monoblock.cli._shared.output import echo
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.runs.pipeline import Pipeline

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

device_option = click.option("--device", help="cpu, cuda, cuda:1, …  [default: cuda if available, else cpu]")
dtype_option = click.option(
    "--dtype", help="Weights in fp32, bf16 or fp16.  [default: bf16 on a GPU that supports it, else fp32]"
)

force_option = click.option(
    "--force", is_flag=True, help="Load the tokenizer of a published model even if it seems to belong to another one."
)
ensemble_option = click.option(
    "--ensemble",
    multiple=True,
    metavar="MODEL",
    help="A further model with the same tokenizer; the log-probabilities of all are averaged. May be repeated.",
)


class DefaultChoice(NamedTuple):
    value: str
    why: str


def choose_device() -> DefaultChoice:
    """Return the default device and the reason for it."""
    import torch

    if torch.cuda.is_available():
        return DefaultChoice("cuda", f"a CUDA device is available: {torch.cuda.get_device_name()}")
    if torch.backends.mps.is_available():
        return DefaultChoice("mps", "an Apple GPU is available, and no CUDA device")
    if torch.version.cuda is None:
        return DefaultChoice("cpu", "this build of torch has no CUDA support")
    return DefaultChoice("cpu", "torch was built with CUDA but finds no device")


def choose_dtype(device: str) -> DefaultChoice:
    """Return the default dtype on a device and the reason for it."""
    import torch

    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return DefaultChoice(
            "bfloat16", "this GPU supports it; it needs half the memory of float32, and no loss scaling as float16 does"
        )
    if device == "cuda":
        return DefaultChoice("float32", "this GPU does not support bfloat16, and float16 would need loss scaling")
    return DefaultChoice("float32", f"lower precision is rarely faster on {device}, and float32 is more accurate")


def resolve_device(device: str | None, dtype: str | None) -> tuple[str, Any]:
    """Return the given device and torch dtype, or the defaults for None; the device "mps" is replaced by "cpu"."""
    import torch

    from monoblock.training.runtime import check_device

    device = device or choose_device().value
    device = "cpu" if device == "mps" else device
    check_device(device, "--device ", "cpu or cuda")
    name = dtype or choose_dtype(device.partition(":")[0]).value
    if name not in {*DTYPES, *DTYPES.values()}:
        raise ConfigError(f"--dtype {name} is not a dtype for weights; write one of {', '.join(DTYPES)}")
    return device, getattr(torch, DTYPES.get(name, name))


def load_pipeline(
    model: str,
    device: str | None,
    dtype: str | None,
    *,
    force: bool = False,
    ensemble: Sequence[str] = (),
    world: World | None = None,
) -> Pipeline:
    """Load a model folder as a Pipeline; print a warning if fields of generation_config.json are ignored.

    world: the processes that share the model.
    """
    from monoblock.runs.load import load

    device, torch_dtype = resolve_device(device, dtype)
    others = [Path(other) for other in ensemble]
    pipe = load(Path(model), device=device, dtype=torch_dtype, force=force, ensemble=others, world=world)
    if pipe.defaults.ignored_fields:
        fields = ", ".join(pipe.defaults.ignored_fields)
        echo(f"warning: these fields of generation_config.json are not supported and ignored: {fields}", err=True)
    return pipe
