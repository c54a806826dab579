"""A folder is a model: config.json beside model.safetensors.  No pickle, no code, nothing outside the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.schema import from_dict, to_dict

if TYPE_CHECKING:
    from monoblock.model import Transformer
    from monoblock.recurrent import Recurrent

CONFIG, WEIGHTS, FORMAT = "config.json", "model.safetensors", "monoblock"
LARGEST_CONFIG = 16 * 2**20
T = TypeVar("T", "Transformer", "Recurrent")


def save_model(model: Transformer | Recurrent, folder: str | Path) -> None:
    """Write both files beside their old versions first, then put them in place."""
    folder = Path(folder)
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = "recurrent" if isinstance(model.config, RecurrentConfig) else "model"
        data = {"format": FORMAT, kind: to_dict(model.config)}
        tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / f"{WEIGHTS}.tmp", metadata={"format": "pt"})
        (folder / f"{CONFIG}.tmp").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            _settle(folder / f"{name}.tmp", folder / name)
    except OSError as problem:
        raise FileError(f"the model cannot be written to {folder}: {problem.strerror or problem}") from None


def _settle(written: Path, place: Path) -> None:
    """On disk for certain, then renamed: a crash leaves the old file or the new one, never half of one."""
    with open(written, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(written, place)


def read_config(folder: str | Path) -> ModelConfig | RecurrentConfig:
    """The configuration in a folder of ours."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileError(f"{folder} is no model folder: it has no {CONFIG}")
    if path.stat().st_size > LARGEST_CONFIG:
        raise FileError(f"{path} is larger than any configuration; is it the right file?")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise FileError(f"{path} is not JSON: {problem}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileError(f'{path} was not written by monoblock: it lacks "format": "{FORMAT}"')
    try:
        if "recurrent" in data:
            return from_dict(RecurrentConfig, data["recurrent"], "recurrent")
        return ModelConfig.from_dict(data.get("model"))
    except ConfigError as problem:
        raise FileError(f"{path}: {problem}") from None


def load_model(cls: type[T], folder: str | Path, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> T:
    """Build on the meta device, then lay the stored tensors in: nothing is drawn only to be thrown away."""
    folder = Path(folder)
    dtype = _dtype(dtype)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device!r} is not here: torch sees no GPU; write device='cpu'")
    config = read_config(folder)
    if isinstance(config, RecurrentConfig) != (cls.__name__ == "Recurrent"):
        what = "an LSTM" if isinstance(config, RecurrentConfig) else "a Transformer"
        raise FileError(f"{folder} holds {what}, and {cls.__name__} was asked to load it")
    with torch.device("meta"):
        model = cls(config)  # type: ignore[arg-type]
    stored = _tensors(folder / WEIGHTS, {n: t.shape for n, t in model.state_dict().items()}, dtype, device)
    model.load_state_dict(stored, assign=True, strict=True)
    return model


def _dtype(given: torch.dtype | str) -> torch.dtype:
    """A number format by itself or by its name: "float16", "bf16"."""
    short = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = getattr(torch, short.get(given, given), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype={given!r} is no format for weights; write {', '.join(short)} or a torch dtype")
    return found


def _tensors(path: Path, wanted: dict[str, torch.Size], dtype: torch.dtype, device: str) -> dict[str, Any]:
    if not path.is_file():
        raise FileError(f"{path.parent} has no {WEIGHTS}")
    try:
        with safe_open(path, framework="pt", device=device) as file:
            _compare(path, set(file.keys()), set(wanted))
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as problem:
        raise FileError(f"{path} cannot be read: {problem}") from None
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name]:
            shapes = f"{tuple(tensor.shape)} where the configuration says {tuple(wanted[name])}"
            raise FileError(f"{path}: {name} has shape {shapes}")
        if not tensor.is_floating_point():
            raise FileError(f"{path}: {name} holds {tensor.dtype} where weights are floating-point numbers")
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _compare(path: Path, stored: set[str], wanted: set[str]) -> None:
    for left_over, what in ((stored - wanted, "holds a tensor the model has no place for"), (wanted - stored, "lacks")):
        if left_over:
            more = f" (and {len(left_over) - 1} more)" if len(left_over) > 1 else ""
            raise FileError(f"{path} {what}: {min(left_over)}{more}")
