"""Write a model as a GGUF file, the format of llama.cpp, with F32, F16 or Q8_0 matrices."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monoblock.errors import ConfigError, InputError, did_you_mean
from monoblock.interop.generation import sampling_fields
from monoblock.interop.gguf.architectures import ARCHITECTURES, LM_CLASS, ROPE_FACTORS, VOCAB_SIZE, with_rope_factors
from monoblock.interop.gguf.reader import import_gguf
from monoblock.interop.huggingface.family import Family
from monoblock.interop.rename import map_weights
from monoblock.interop.save import state_to_save, writing
from monoblock.quantization.convert import dequantize, merge_adapters
from monoblock.tokenizers.formats.gguf import NO_TOKENIZER, PREFIX, to_fields
from monoblock.untrusted_files import open_to_write

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # general.file_type in GGUF, by the storage type of the matrices
STORAGE_DTYPES = {"f32": np.float32, "f16": np.float16, "q8_0": np.uint8}
Q8_BLOCK = 32
HF_ONLY_FIELDS = ("architectures", "model_type", "tie_word_embeddings")
MAX_F16 = 65504.0


def save_gguf(
    model: Transformer,
    path: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    kind: str = "f16",
    name: str = "model",
) -> None:
    """Write a model as a GGUF file.

    LoRA adapters are written merged into the weights, and a quantized model is dequantized first.

    generation: the content of a generation_config.json; a warning names what GGUF has no room for.
    kind: the storage type of the matrices: f32, f16 or q8_0.
    """
    if kind not in FILE_TYPES:
        raise ConfigError(f"kind={kind!r} is none of {', '.join(FILE_TYPES)}{did_you_mean(kind, FILE_TYPES)}")
    model = merge_adapters(model)
    if model.config.quantize is not None:
        warnings.warn(
            f"the weights are dequantized from {model.config.quantize.bits} bits, and written as {kind}", stacklevel=2
        )
        model = dequantize(model)
    sampling, lost = sampling_fields(generation or {})
    if lost:
        warnings.warn(f"GGUF has no room for these settings of generation: {', '.join(lost)}", stacklevel=2)
    family, fields = _choose_architecture(model)
    rope_factors = fields.pop(ROPE_FACTORS, None)
    vocabulary: dict[str, Any] = {f"{PREFIX}.model": NO_TOKENIZER}
    if tokenizer is not None:
        vocabulary = to_fields(*tokenizer.content(), fields[VOCAB_SIZE])
    package = import_gguf()
    path, temporary = Path(path), Path(f"{path}.tmp")
    with writing(path.parent):
        open_to_write(temporary).close()  # the writer itself would follow a link
        writer = package.GGUFWriter(temporary, family.model_type)
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[kind])
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for field, value in fields.items():
            _add_field(writer, f"{family.model_type}.{field}", value)
        for field, value in (vocabulary | sampling).items():
            _add_field(writer, field, value)
        _write_tensors(writer, model, family, kind, rope_factors)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _choose_architecture(model: Transformer) -> tuple[Family, dict[str, Any]]:
    """Return the first architecture of llama.cpp that can express a model, and the fields of its GGUF file."""
    if model.config.family != "decoder-only":
        raise ConfigError(
            f"GGUF is written only for decoders, but this model is {model.config.family}; choose hf or monoblock"
        )
    reasons = []
    for family in ARCHITECTURES.values():
        try:
            fields = family.write_config(with_rope_factors(model.config), LM_CLASS)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        return family, {key: value for key, value in fields.items() if key not in HF_ONLY_FIELDS and value is not None}
    raise ConfigError(f"none of the supported GGUF architectures can express this model: {'; '.join(reasons)[:300]}")


def _add_field(writer: Any, field: str, value: Any) -> None:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    kind = kinds.get(type(value), "ARRAY")
    if kind != "ARRAY" or len(value):
        value = list(value) if kind == "ARRAY" else value
        writer.add_key_value(field, value, import_gguf().GGUFValueType[kind])


def _write_tensors(
    writer: Any, model: Transformer, family: Family, kind: str, rope_factors: list[float] | None
) -> None:
    """Write the list of tensors, then the tensors one by one, so that there is never a copy of the whole model."""
    state = {name: tensor.detach() for name, tensor in state_to_save(model).items()}
    types, quants = import_gguf().GGMLQuantizationType, import_gguf().quants
    mappings = list(map_weights(family.weights, {name: tensor.shape for name, tensor in state.items()}, model.config))
    storages = list[str]()
    if rope_factors is not None:
        writer.add_tensor_info("rope_freqs.weight", (len(rope_factors),), np.dtype(np.float32), 4 * len(rope_factors))
    for mapping in mappings:
        (tensor,) = mapping.save([state[name].to("meta") for name in mapping.ours])
        shape, name = tuple(tensor.shape), mapping.theirs[0]
        storages.append(_storage_type(shape, name, kind))
        if storages[-1] == "q8_0":
            shape = quants.quant_shape_to_byte_shape(shape, types.Q8_0)
        dtype = np.dtype(STORAGE_DTYPES[storages[-1]])
        size = math.prod(shape) * dtype.itemsize
        writer.add_tensor_info(name, shape, dtype, size, raw_dtype=types[storages[-1].upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if rope_factors is not None:
        writer.write_tensor_data(np.array(rope_factors, dtype=np.float32))
    for mapping, storage in zip(mappings, storages, strict=True):
        (tensor,) = mapping.save([state[name].float().cpu() for name in mapping.ours])
        if storage == "f16" and tensor.abs().max() > MAX_F16:
            raise InputError(f"{mapping.theirs[0]} contains numbers too large for f16; write kind='f32'")
        writer.write_tensor_data(quants.quantize(tensor.contiguous().numpy(), types[storage.upper()]))
    writer.close()


def _storage_type(shape: tuple[int, ...], name: str, kind: str) -> str:
    """Return the storage type of a tensor: f32 for vectors and position tables, as llama.cpp expects, else `kind`.

    If `kind` is q8_0 but the row length is not a multiple of its block size, the type is f16.
    """
    if len(shape) < 2 or name.startswith("position_embd"):
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % Q8_BLOCK else kind
