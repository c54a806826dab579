"""A folder is a model: config.json beside model.safetensors (or its shards).  No pickle, no code, nothing outside it.

A folder of ours says so in its config.json; one that names a model_type instead is a Hugging Face folder, hf.py's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.hub import at_hand
from monoblock.interop.reader import Reader
from monoblock.interop.safely import on_meta, open_weights
from monoblock.interop.shards import LARGEST, save_weights, settle
from monoblock.quantize.convert import build, stored_formats
from monoblock.schema import from_dict, to_dict
from monoblock.untrusted import inside, present, read_json

if TYPE_CHECKING:
    from monoblock.model import Transformer
    from monoblock.recurrent import Recurrent

CONFIG, FORMAT = "config.json", "monoblock"
T = TypeVar("T", "Transformer", "Recurrent")


def save_model(model: Transformer | Recurrent, folder: str | Path, *, largest: int = LARGEST) -> None:
    """Write the files beside their old versions first, then put them in place; weights in files of `largest` bytes."""
    folder = Path(folder)
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = "recurrent" if isinstance(model.config, RecurrentConfig) else "model"
        data = {"format": FORMAT, kind: to_dict(model.config)}
        makers = [{name: lambda tensor=tensor: tensor} for name, tensor in state.items()]
        save_weights(folder, makers, {name: tensor.nbytes for name, tensor in state.items()}, largest)
        (folder / f"{CONFIG}.tmp").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        settle(folder / CONFIG)
    except OSError as problem:
        raise FileError(f"the model cannot be written to {folder}: {problem.strerror or problem}") from None


def _read(folder: str | Path) -> dict[str, Any]:
    if not present(folder, CONFIG):
        raise FileError(f"{folder} is no model folder: it has no {CONFIG}")
    return read_json(inside(folder, CONFIG))


def read_config(folder: str | Path) -> ModelConfig | RecurrentConfig:
    """The configuration in a folder of ours."""
    return _ours(folder, _read(folder))


def _ours(folder: str | Path, data: dict[str, Any]) -> ModelConfig | RecurrentConfig:
    path = Path(folder) / CONFIG
    if data.get("format") != FORMAT:
        raise FileError(f'{path} was not written by monoblock: it lacks "format": "{FORMAT}"')
    try:
        if "recurrent" in data:
            return from_dict(RecurrentConfig, data["recurrent"], "recurrent")
        return ModelConfig.from_dict(data.get("model"))
    except ConfigError as problem:
        raise FileError(f"{path}: {problem}") from None


def load_model(cls: type[T], folder: str | Path, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> T:
    """Build on the meta device, then lay the stored tensors in: nothing is drawn only to be thrown away."""
    folder = at_hand(folder)
    dtype = _dtype(dtype)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device!r} is not here: torch sees no GPU; write device='cpu'")
    if folder.suffix == ".gguf" and folder.is_file():
        from monoblock.interop.gguf import load_gguf

        read: Any = load_gguf
        return read(cls, folder, dtype=dtype, device=device)
    data = _read(folder)
    if "model_type" in data and "format" not in data and cls.__name__ != "Recurrent":
        return _load_published(cls, folder, data, dtype, device)
    config = _ours(folder, data)
    if isinstance(config, RecurrentConfig) != (cls.__name__ == "Recurrent"):
        what = "an LSTM" if isinstance(config, RecurrentConfig) else "a Transformer"
        raise FileError(f"{folder} holds {what}, and {cls.__name__} was asked to load it")
    small = isinstance(config, ModelConfig) and config.quantize is not None
    make: Any = (lambda given: build(given, dtype)) if small else cls
    model: T = on_meta(make, config, len(open_weights(folder)))
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    exact = stored_formats(model)
    found = _exact(folder, exact, device) if exact else {}
    found |= _tensors(folder, wanted, dtype, device, set(exact))
    model.load_state_dict(found, assign=True, strict=True)
    return model


def _exact(folder: Path, wanted: dict[str, torch.dtype], device: str) -> dict[str, torch.Tensor]:
    """What a quantised matrix is stored as: in the very format it was written in."""
    stored = open_weights(folder)
    for name, dtype in wanted.items():
        if name in stored and stored.dtypes[name] != dtype:
            place = stored.file_of[name]
            raise FileError(f"{place}: {name} holds {stored.dtypes[name]} where the configuration says {dtype}")
    return {name: stored[name].to(device) for name in wanted if name in stored}


def _load_published(cls: Any, folder: Path, data: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    from monoblock.interop.hf import load_hf

    try:
        return load_hf(cls, data, open_weights(folder), dtype, device)
    except (ConfigError, FileError) as problem:
        said = str(problem)
        raise FileError(said if said.startswith(str(folder)) else f"{folder}: {said}") from None


def _dtype(given: torch.dtype | str) -> torch.dtype:
    """A number format by itself or by its name: "float16", "bf16"."""
    short = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = getattr(torch, short.get(given, given), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype={given!r} is no format for weights; write {', '.join(short)} or a torch dtype")
    return found


def _tensors(
    folder: Path, wanted: dict[str, torch.Size], dtype: torch.dtype, device: str, exact: set[str]
) -> dict[str, torch.Tensor]:
    """The stored tensors but those taken exactly as they are; shapes are compared for all."""
    stored = open_weights(folder)
    _compare(folder, set(stored), set(wanted))
    for name, shape in wanted.items():
        place = stored.file_of[name]
        if stored.shapes[name] != tuple(shape):
            shapes = f"{stored.shapes[name]} where the configuration says {tuple(shape)}"
            raise FileError(f"{place}: {name} has shape {shapes}")
        if name not in exact and not stored.dtypes[name].is_floating_point:
            raise FileError(f"{place}: {name} holds {stored.dtypes[name]} where weights are floating-point numbers")
    reader = Reader(stored, dtype, device)
    return {name: reader.take([name])[0] for name in wanted if name not in exact}


def _compare(folder: Path, stored: set[str], wanted: set[str]) -> None:
    for left_over, what in ((stored - wanted, "holds a tensor the model has no place for"), (wanted - stored, "lacks")):
        if left_over:
            more = f" (and {len(left_over) - 1} more)" if len(left_over) > 1 else ""
            raise FileError(f"{folder} {what}: {min(left_over)}{more}")
