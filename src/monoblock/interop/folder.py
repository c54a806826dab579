"""Save and load a model as a folder with config.json and model.safetensors (or several shards), no pickle and no code.

In a monoblock folder, config.json contains "format": "monoblock".  A folder whose config.json has a model_type instead
is a Hugging Face folder (huggingface/load.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from monoblock.config.model import CONFIG_KEYS, AnyConfig, ModelConfig, parse_config
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.companions import Companions, cast, choose_dtype, read_companions, stored_size
from monoblock.interop.config_file import CONFIG_FILE, FORMAT_NAME
from monoblock.interop.hub import resolve_model_path
from monoblock.interop.weights import (
    MAX_SHARD_SIZE,
    WeightParts,
    WeightReader,
    build_on_meta,
    open_weights,
    save_weights,
    split_weights,
)
from monoblock.quantization.convert import build_quantized, merge_adapters, stored_dtypes
from monoblock.untrusted_files import has_file, read_json, reading, safe_join, write_atomically

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
T = TypeVar("T")


def save_model(
    model: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    companions: Companions | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write config.json and the weights of a model, divided into files of at most `max_shard_size` bytes.

    LoRA adapters are written merged into the weights.

    dtype: the dtype of the weights; by default that of the files the model was loaded from if it holds the weights
        exactly, else that of the model.
    companions: what else is written; by default what lies beside the weights that the model was loaded from.
    """
    companions = read_companions(model.loaded_from) if companions is None else companions
    folder, model = Path(folder), merge_adapters(model)
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    quantized = isinstance(model.config, ModelConfig) and model.config.quantize is not None
    if quantized and dtype is not None:
        raise ConfigError(
            f"dtype={dtype} is for floating-point weights, but this model is quantized; leave it out, or write the "
            "format hf, which is dequantized"
        )
    stored = None if quantized else parse_dtype(dtype) if dtype else choose_dtype(state, companions.dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "format": FORMAT_NAME,
            CONFIG_KEYS[type(model.config)]: to_dict(model.config),
            **companions.own_fields(),
        }
        factories = [{name: lambda tensor=tensor: cast(tensor, stored)} for name, tensor in state.items()]
        sizes = {name: stored_size(tensor, stored) for name, tensor in state.items()}
        save_weights(folder, factories, sizes, max_shard_size)
        companions.write(folder, model.config, published=False)
        write_atomically(folder / CONFIG_FILE, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise FileError(f"the model cannot be written to {folder}: {error.strerror or error}") from None


def read_config(folder: str | Path) -> AnyConfig:
    """Read the configuration of a monoblock folder."""
    return _parse_config(folder, _read_config_json(folder))


def load_model(
    cls: type[T],
    folder: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: str = "cpu",
    ignore_fields: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
) -> T:
    """Load a monoblock folder, a Hugging Face folder, a GGUF file or a model on the Hugging Face hub.

    The model is built on the meta device and then gets the stored tensors, so that no weight is initialized first.
    `ignore_fields` are fields of a config.json or GGUF file that are read as if the file did not have them.  The
    processes of a `mesh` share every matrix, and each reads its part only.
    """
    folder = resolve_model_path(folder)
    with reading(folder):
        model: Any = _load_model(cls, folder, parse_dtype(dtype), device, ignore_fields, mesh)
    model.loaded_from = folder.resolve()
    return model


def _load_model(
    cls: type[T],
    folder: Path,
    dtype: torch.dtype,
    device: str,
    ignore_fields: Sequence[str],
    mesh: DeviceMesh | None,
) -> T:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={device!r} is not available: torch finds no GPU; write device='cpu'")
    if folder.suffix == ".gguf" and folder.is_file():
        from monoblock.interop.gguf.reader import load_gguf

        load: Any = load_gguf
        return load(cls, folder, dtype=dtype, device=device, ignore_fields=ignore_fields, mesh=mesh)
    data = _read_config_json(folder)
    if _is_huggingface(data):
        return _load_huggingface(cls, folder, data, dtype, device, ignore_fields, mesh)
    if ignore_fields:
        raise InputError(f"{folder} was written by monoblock, which has no fields to ignore; drop ignore_fields")
    config = _parse_config(folder, data)
    quantized = isinstance(config, ModelConfig) and config.quantize is not None
    if mesh is not None and (quantized or not isinstance(config, ModelConfig)):
        kind = "a quantized model" if quantized else "no Transformer, but a model"
        raise InputError(f"{folder} contains {kind}, which several processes cannot share; load it in one process")
    build: Any = partial(build_quantized, cls, dtype=dtype) if quantized else cls
    try:
        model: Any = build_on_meta(build, config, len(open_weights(folder)))
    except ConfigError as error:  # such as that of another kind of model
        raise FileError(f"{folder}: {error}") from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    quantized_dtypes, parts = stored_dtypes(model), split_weights(model, mesh)
    state = _load_quantized(folder, quantized_dtypes, device) if quantized_dtypes else {}
    state |= _load_tensors(folder, shapes, dtype, device, set(quantized_dtypes), parts)
    model.load_state_dict(state, assign=True, strict=True)
    return model.eval()


def _read_config_json(folder: str | Path) -> dict[str, Any]:
    if not has_file(folder, CONFIG_FILE):
        raise FileError(f"{folder} is not a model folder: it has no {CONFIG_FILE}")
    return read_json(safe_join(folder, CONFIG_FILE))


def _parse_config(folder: str | Path, data: dict[str, Any]) -> AnyConfig:
    path = Path(folder) / CONFIG_FILE
    if data.get("format") != FORMAT_NAME:
        raise FileError(f'{path} was not written by monoblock: it does not contain "format": "{FORMAT_NAME}"')
    try:
        return parse_config(data)
    except ConfigError as error:
        raise FileError(f"{path}: {error}") from None


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a torch dtype, given as a dtype or by a name such as "float16" or "bf16"."""
    parsed = getattr(torch, DTYPE_NAMES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise InputError(f"dtype={dtype!r} is not a dtype for weights; write {', '.join(DTYPE_NAMES)} or a torch dtype")
    return parsed


def _is_huggingface(data: dict[str, Any]) -> bool:
    from monoblock.interop.huggingface.load import is_hf_config

    return is_hf_config(data)


def _load_huggingface(
    cls: Any,
    folder: Path,
    data: dict[str, Any],
    dtype: torch.dtype,
    device: str,
    ignore_fields: Sequence[str],
    mesh: DeviceMesh | None,
) -> Any:
    from monoblock.interop.huggingface.field_rules import without_fields
    from monoblock.interop.huggingface.load import load_hf

    try:
        return load_hf(cls, without_fields(data, ignore_fields), open_weights(folder), dtype, device, mesh)
    except (ConfigError, FileError) as error:
        message = str(error)
        raise FileError(message if message.startswith(str(folder)) else f"{folder}: {message}") from None


def _load_quantized(folder: Path, dtypes: dict[str, torch.dtype], device: str) -> dict[str, torch.Tensor]:
    """Load the tensors of quantized matrices without converting them; `dtypes` are the expected dtypes by name."""
    stored = open_weights(folder)
    for name, dtype in dtypes.items():
        if name in stored and stored.dtypes[name] != dtype:
            file = stored.file_of[name]
            raise FileError(f"{file}: {name} has dtype {stored.dtypes[name]}, but the configuration requires {dtype}")
    return {name: stored[name].to(device) for name in dtypes if name in stored}


def _load_tensors(
    folder: Path,
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    device: str,
    quantized: set[str],
    parts: WeightParts,
) -> dict[str, torch.Tensor]:
    """Check the names and shapes of all stored tensors, and load the parts of those that are not quantized."""
    stored = open_weights(folder)
    _check_names(folder, set(stored), set(shapes))
    for name, shape in shapes.items():
        file = stored.file_of[name]
        if stored.shapes[name] != tuple(shape):
            difference = f"{stored.shapes[name]}, but the configuration requires {tuple(shape)}"
            raise FileError(f"{file}: {name} has shape {difference}")
        if name not in quantized and not stored.dtypes[name].is_floating_point:
            raise FileError(f"{file}: {name} has dtype {stored.dtypes[name]}, but weights must be floating-point")
    reader = WeightReader(stored, dtype, device)
    names = [name for name in shapes if name not in quantized]
    return {name: parts.join(name, *reader.load([name], partial(parts.select, [name]))) for name in names}


def _check_names(folder: Path, stored: set[str], expected: set[str]) -> None:
    unexpected, missing = stored - expected, expected - stored
    for names, problem in ((unexpected, "has a tensor that the model does not use"), (missing, "lacks the tensor")):
        if names:
            rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            hint = "; if a subclass of Transformer was trained, give it to mb.load as model_class" if unexpected else ""
            raise FileError(f"{folder} {problem}: {min(names)}{rest}{hint}")
