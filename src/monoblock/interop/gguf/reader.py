"""Read a model from a GGUF file, the format of llama.cpp: configuration, weights and tokenizer in one file.

Tensors in Q8_0, F16 and F32 are converted here, those in other storage types by the `gguf` package.  Before that, this
module checks that the tensors in the header do not overlap and do not end after the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.gguf.architectures import ARCHITECTURES, LM_CLASS, ROPE_FACTORS, VOCAB_SIZE
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.field_rules import without_fields
from monoblock.interop.rename import map_weights
from monoblock.interop.weights import TensorFunction, build_on_meta, check_names, read_weights, without_rest
from monoblock.tokenizers.formats.gguf import GgufHeader, TensorInfo
from monoblock.untrusted_files import short_repr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from monoblock.nn.transformer import Transformer

BLOCKS_PER_PASS = 2**15  # quantization blocks converted at once, to limit memory
FLOAT_DTYPES = {"F32": np.float32, "F16": np.float16}
Array = np.ndarray[Any, Any]


def _convert_floats(raw: Array, ggml_type: Any, values: Array) -> None:
    values[:] = raw.view(FLOAT_DTYPES[ggml_type.name])


def _convert_q8_0(raw: Array, ggml_type: Any, values: Array) -> None:
    """Convert blocks of 32 numbers of 8 bits, each behind its scale in 16 bits."""
    blocks = torch.from_numpy(raw).view(-1, 34)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    torch.mul(blocks[:, 2:].view(torch.int8), scales, out=torch.from_numpy(values).view(-1, 32))


# By storage type; the result is bit for bit that of the gguf package.
CONVERSIONS = {"F32": _convert_floats, "F16": _convert_floats, "Q8_0": _convert_q8_0}


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise FileError("GGUF files need the package gguf; install it with pip install 'monoblock[gguf]'") from None
    return gguf


class GgufWeights(Mapping[str, Tensor]):
    """The tensors of a GGUF file by name, each converted to float32 on access."""

    def __init__(self, path: str | Path, header: GgufHeader) -> None:
        self.path, self.header, self.gguf = Path(path), header, import_gguf()
        self.byte_sizes = {name: self._byte_size(name, info) for name, info in header.tensors.items()}
        end = 0
        for name, info in sorted(header.tensors.items(), key=lambda item: item[1].offset):
            if info.offset < end:
                raise FileError(f"{path} is damaged: {short_repr(name)} overlaps another tensor")
            end = info.offset + self.byte_sizes[name]
        if header.data_offset + end > header.file_size:
            raise FileError(
                f"{path} is cut short: its tensors need {header.data_offset + end:,} bytes, "
                f"but it has only {header.file_size:,}"
            )
        self.raw = np.frombuffer(header.raw, dtype=np.uint8)

    def _byte_size(self, name: str, info: TensorInfo) -> int:
        """Return the number of bytes of a tensor, from its shape and storage type."""
        try:
            ggml_type = self.gguf.GGMLQuantizationType(info.ggml_type)
            block, block_bytes = self.gguf.GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            raise FileError(f"{self.path}: {short_repr(name)} has the unknown storage type {info.ggml_type}") from None
        if info.shape[-1] % block:
            raise FileError(
                f"{self.path} is damaged: the row length {info.shape[-1]} of {short_repr(name)} is not a multiple of "
                f"{block}, the block size of {ggml_type.name}"
            )
        return int(math.prod(info.shape) // block * block_bytes)

    def __getitem__(self, name: str) -> Tensor:
        info = self.header.tensors[name]
        start = self.header.data_offset + info.offset
        ggml_type = self.gguf.GGMLQuantizationType(info.ggml_type)
        block, block_bytes = self.gguf.GGML_QUANT_SIZES[ggml_type]
        values = np.empty(math.prod(info.shape), dtype=np.float32)
        convert = CONVERSIONS.get(ggml_type.name, self._convert_slowly)
        try:
            for first in range(0, len(values), BLOCKS_PER_PASS * block):
                chunk = values[first : first + BLOCKS_PER_PASS * block]
                offset = start + first // block * block_bytes
                convert(self.raw[offset : offset + len(chunk) // block * block_bytes], ggml_type, chunk)
        except (NotImplementedError, KeyError, ValueError):
            raise FileError(
                f"{self.path}: {short_repr(name)} has the storage type {ggml_type.name}, which is not supported"
            ) from None
        return torch.from_numpy(values).reshape(info.shape)

    def _convert_slowly(self, raw: Array, ggml_type: Any, values: Array) -> None:
        """Convert with the gguf package, as one long row, because it is slow with many rows."""
        values[:] = self.gguf.quants.dequantize(raw.reshape(1, -1), ggml_type).reshape(-1)

    def __contains__(self, name: object) -> bool:  # that of Mapping would convert the tensor
        return name in self.header.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.tensors)

    def __len__(self) -> int:
        return len(self.header.tensors)


def read_gguf_config(stored: GgufWeights, ignore_fields: Sequence[str]) -> tuple[Family, ModelConfig]:
    """Return the architecture in a GGUF file, and the configuration of its model."""
    path, header = stored.path, stored.header
    name = header.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = did_you_mean(str(name)[:40], ARCHITECTURES)
        known = ", ".join(ARCHITECTURES)
        raise FileError(f"{path}: the architecture {short_repr(name)} is not one of {known}, which are supported{hint}")
    family = ARCHITECTURES[name]
    try:
        fields = without_fields(_config_fields(name, header, stored), ignore_fields)
        tree = family.config_tree(fields, LM_CLASS, harmless=lambda name, value: False)  # attention.causal is false
        return family, family.build_config(tree, fields, tied=_is_tied(stored))
    except (ConfigError, FileError) as error:
        raise FileError(f"{path}: {error}") from None


def load_gguf(
    cls: type[Transformer],
    stored: GgufWeights,
    ignore_fields: Sequence[str],
    *,
    dtype: torch.dtype,
    device: str,
    mesh: DeviceMesh | None,
) -> Transformer:
    """Load the model in a GGUF file, or the parts of this process."""
    family, config = read_gguf_config(stored, ignore_fields)
    try:
        model: Transformer = build_on_meta(cls, config, len(stored))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        mappings, names = list(map_weights(family.weights, shapes, config)), {name: name for name in stored}
        optional = ("rope_freqs.weight", *(["output.weight"] if config.tie == "output" else []))
        check_names(names, {name: None for mapping in mappings for name in mapping.theirs}, optional)
        state = read_weights(model, mappings, names, GgufReader(stored, dtype, device, is_split=mesh is not None), mesh)
    except (ConfigError, FileError) as error:
        raise FileError(f"{stored.path}: {error}") from None
    model.load_state_dict(state, assign=True)
    return model


class GgufReader(NamedTuple):
    """Read the tensors of a GGUF file, transform them and convert them to one dtype on one device."""

    weights: GgufWeights
    dtype: torch.dtype
    device: str
    is_split: bool  # whether results may be small parts of tensors, which must not keep the rest in memory

    def load(self, keys: Sequence[str], transform: TensorFunction) -> Sequence[Tensor]:
        """Apply `transform` to the tensors with these names; return its results in `self.dtype` on `self.device`."""
        try:
            tensors = transform([self.weights[key] for key in keys])
        except RuntimeError as error:
            raise FileError(f"{keys[0]} does not fit the configuration: {' '.join(str(error).split())[:100]}") from None
        tensors = [without_rest(tensor) for tensor in tensors] if self.is_split else tensors
        return [tensor.to(self.device, self.dtype, memory_format=torch.contiguous_format) for tensor in tensors]


def _config_fields(architecture: str, header: GgufHeader, stored: GgufWeights) -> dict[str, Any]:
    """Return the fields of an architecture without their prefix, and VOCAB_SIZE and ROPE_FACTORS from the tensors."""
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in header.fields.items() if name.startswith(prefix)}
    if "token_embd.weight" not in stored:
        raise FileError("it lacks the tensor token_embd.weight, the token embedding")
    fields[VOCAB_SIZE] = header.tensors["token_embd.weight"].shape[0]
    if "rope_freqs.weight" in stored:
        fields[ROPE_FACTORS] = stored["rope_freqs.weight"].tolist()
    return fields


def _is_tied(stored: GgufWeights) -> bool:
    """Return whether the output is tied to the embedding: its matrix is not stored, or equal to the embedding."""
    if "output.weight" not in stored:
        return True
    output, embedding = (stored.header.tensors[name] for name in ("output.weight", "token_embd.weight"))
    same_layout = (output.shape, output.ggml_type) == (embedding.shape, embedding.ggml_type)
    return same_layout and torch.equal(stored["output.weight"], stored["token_embd.weight"])
