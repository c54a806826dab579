"""GGUF, llama.cpp's format, in and out: one file with configuration, weights and tokenizer.

Reading gives the weights as they are worth: blocks of 4, 5, 6 and 8 bits become ordinary numbers. Writing knows F32,
F16 and Q8_0. The bits are the `gguf` package's affair; that no file claims what it does not hold is ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from monoblock.config import ModelConfig
from monoblock.errors import ConfigError, FileError, InputError, did_you_mean
from monoblock.interop.gguf_names import ARCHITECTURES, CLASS, FACTORS, VOCAB, by_factors
from monoblock.interop.hf_family import Family
from monoblock.interop.rename import plan
from monoblock.interop.safely import on_meta
from monoblock.tokenizers import gguf_vocab
from monoblock.tokenizers.gguf_header import Described, Head, read_head
from monoblock.untrusted import shown

if TYPE_CHECKING:
    from monoblock.model import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

# How the rows of a file are stored -> the number of the whole file's kind, which llama.cpp prints.
KINDS = {"f32": 0, "f16": 1, "q8_0": 7}
WRITTEN = ("architectures", "model_type", "tie_word_embeddings")
LARGEST_F16 = 65504.0
PASSING = 2**15  # blocks made numbers at once
FLOATS = {"F32": np.float32, "F16": np.float16}
NUMBERS = {"f32": np.float32, "f16": np.float16, "q8_0": np.uint8}


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise FileError("reading GGUF needs the package gguf; write pip install 'monoblock[gguf]'") from None
    return gguf


# -- reading -----------------------------------------------------------------------------------------------------------


class GgufWeights(Mapping[str, Tensor]):
    """The tensors of a GGUF file by name, each made float32 when it is asked for."""

    def __init__(self, path: str | Path, head: Head) -> None:
        self.path, self.head, self.gguf = Path(path), head, _package()
        self.sizes = {name: self._bytes(name, described) for name, described in head.tensors.items()}
        reached = 0
        for name, described in sorted(head.tensors.items(), key=lambda row: row[1].offset):
            if described.offset < reached:
                raise FileError(f"{path} is damaged: {shown(name)} overlaps another tensor")
            reached = described.offset + self.sizes[name]
        if head.data + reached > head.size:
            raise FileError(f"{path} is cut short: its tensors need {head.data + reached:,} bytes of {head.size:,}")
        self.raw = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))

    def _bytes(self, name: str, described: Described) -> int:
        """How many bytes a tensor takes, by its shape and kind."""
        try:
            kind = self.gguf.GGMLQuantizationType(described.kind)
            block, size = self.gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise FileError(f"{self.path}: {shown(name)} is stored in a way not known ({described.kind})") from None
        if described.shape[-1] % block:
            raise FileError(
                f"{self.path} is damaged: rows of {described.shape[-1]} in {shown(name)} are no whole blocks"
            )
        return int(math.prod(described.shape) // block * size)

    def __getitem__(self, name: str) -> Tensor:
        described = self.head.tensors[name]
        start = self.head.data + described.offset
        kind = self.gguf.GGMLQuantizationType(described.kind)
        block, size = self.gguf.GGML_QUANT_SIZES[kind]
        values = np.empty(math.prod(described.shape), dtype=np.float32)
        try:
            for first in range(0, len(values), PASSING * block):  # as one long row: the package goes row by row
                some = values[first : first + PASSING * block]
                place = start + first // block * size
                raw = self.raw[place : place + len(some) // block * size].reshape(1, -1)
                some[:] = self.gguf.quants.dequantize(raw.view(FLOATS.get(kind.name, np.uint8)), kind).reshape(-1)
        except (NotImplementedError, KeyError, ValueError):
            raise FileError(f"{self.path}: {shown(name)} is stored as {kind.name}, which is not read") from None
        return torch.from_numpy(values).reshape(described.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.head.tensors)

    def __len__(self) -> int:
        return len(self.head.tensors)


def _opened(path: str | Path) -> tuple[Family, GgufWeights, ModelConfig]:
    """What a file says of its model, before its matrices are read."""
    head = read_head(path)
    family = _family(head.fields.get("general.architecture"), path)
    stored = GgufWeights(path, head)
    try:
        tree = family.tree(_given(family.kind, head, stored), CLASS, frozenset())
        return family, stored, family.config(tree, tied=_tied(stored))
    except (ConfigError, FileError) as problem:
        raise FileError(f"{path}: {problem}") from None


def gguf_config(path: str | Path) -> ModelConfig:
    """The configuration of the model in a GGUF file."""
    return _opened(path)[2]


def load_gguf(
    cls: type[Transformer], path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Transformer:
    """The model in a GGUF file."""
    family, stored, config = _opened(path)
    try:
        model: Transformer = on_meta(cls, config, len(stored))
    except (ConfigError, FileError) as problem:
        raise FileError(f"{path}: {problem}") from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    left = set(stored) - {"rope_freqs.weight"} - ({"output.weight"} if config.tie == "output" else set())
    weights: dict[str, Tensor] = {}
    for move in plan(family.weights, shapes, config):
        lacking = next((name for name in move.theirs if name not in stored), None)
        if lacking is not None:
            raise FileError(f"{path} lacks {lacking}")
        found = {name: stored[name] for name in move.theirs}
        try:
            parts = move.load(list(found.values()))
        except RuntimeError:
            parts = [torch.empty(0)]
        if [part.shape for part in parts] != [shapes[name] for name in move.ours]:
            held = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in found.items())
            raise FileError(f"{path}: {held} does not fit the configuration")
        made = [part.to(device, dtype, memory_format=torch.contiguous_format) for part in parts]
        weights |= dict(zip(move.ours, made, strict=True))
        left -= set(move.theirs)
    if left:
        raise FileError(f"{path} holds a tensor the model has no place for: {min(left)}")
    model.load_state_dict(weights, assign=True)
    return model


def _family(kind: Any, path: str | Path) -> Family:
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        guess = did_you_mean(str(kind)[:40], ARCHITECTURES)
        raise FileError(f"{path}: the architecture {shown(kind)} is none of {', '.join(ARCHITECTURES)}{guess}")
    return ARCHITECTURES[kind]


def _given(kind: str, head: Head, stored: GgufWeights) -> dict[str, Any]:
    """The fields of a family without its name, and what only tensors tell."""
    begin = f"{kind}."
    given = {name.removeprefix(begin): value for name, value in head.fields.items() if name.startswith(begin)}
    if "token_embd.weight" not in stored:
        raise FileError("it lacks token_embd.weight")
    given[VOCAB] = head.tensors["token_embd.weight"].shape[0]
    if "rope_freqs.weight" in stored:
        given[FACTORS] = stored["rope_freqs.weight"].tolist()
    return given


def _tied(stored: GgufWeights) -> bool:
    """Whether the output is the embedding: it is not stored, or stored once more the same."""
    if "output.weight" not in stored:
        return True
    one, other = (stored.head.tensors[name] for name in ("output.weight", "token_embd.weight"))
    same = (one.shape, one.kind) == (other.shape, other.kind)
    return same and torch.equal(stored["output.weight"], stored["token_embd.weight"])


# -- writing -----------------------------------------------------------------------------------------------------------


def save_gguf(
    model: Transformer, path: str | Path, *, tokenizer: Tokenizer | None = None, kind: str = "f16", name: str = "model"
) -> None:
    """Write a GGUF file that llama.cpp loads; `kind` is f32, f16 or q8_0, and says how matrices are stored."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    family, fields = _chosen(model)
    factors = fields.pop(FACTORS, None)
    package = _package()
    path, beside = Path(path), Path(f"{path}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = package.GGUFWriter(beside, family.kind)
        writer.add_name(name)
        writer.add_file_type(KINDS[kind])
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for field, value in fields.items():
            _add(writer, f"{family.kind}.{field}", value)
        vocabulary: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab"}
        if tokenizer is not None:
            vocabulary = gguf_vocab.to_fields(*tokenizer.content(), fields[VOCAB])
        for field, value in vocabulary.items():
            _add(writer, field, value)
        _write_tensors(writer, model, family, kind, factors)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as problem:
        raise FileError(f"the model cannot be written to {path}: {problem.strerror or problem}") from None


def _chosen(model: Transformer) -> tuple[Family, dict[str, Any]]:
    """The architecture of llama.cpp that can say this model, and its fields."""
    if model.config.family != "decoder-only":
        raise ConfigError(
            f"GGUF is written for decoders; this is {model.config.family}: write --format hf or monoblock"
        )
    refused = []
    for family in ARCHITECTURES.values():
        try:
            found = family.write(by_factors(model.config), CLASS)
        except ConfigError as problem:
            refused.append(str(problem))
            continue
        return family, {key: value for key, value in found.items() if key not in WRITTEN and value is not None}
    raise ConfigError(f"no architecture of GGUF can say this model: {'; '.join(refused)[:300]}")


def _add(writer: Any, field: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(field, value)
        case int():
            writer.add_uint32(field, value)
        case float():
            writer.add_float32(field, value)
        case str():
            writer.add_string(field, value)
        case _:
            writer.add_array(field, list(value))


def _write_tensors(writer: Any, model: Transformer, family: Family, kind: str, factors: list[float] | None) -> None:
    """First what every tensor is, then the tensors one by one, so that no second copy of the model is held."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    types, quants = _package().GGMLQuantizationType, _package().quants
    moves = list(plan(family.weights, {name: tensor.shape for name, tensor in state.items()}, model.config))
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", (len(factors),), np.dtype(np.float32), 4 * len(factors))
    for move in moves:
        (made,) = move.save([state[name].to("meta") for name in move.ours])
        how = _stored_as(tuple(made.shape), move.theirs[0], kind)
        shape = quants.quant_shape_to_byte_shape(made.shape, types.Q8_0) if how == "q8_0" else tuple(made.shape)
        dtype = np.dtype(NUMBERS[how])
        size = math.prod(shape) * dtype.itemsize
        writer.add_tensor_info(move.theirs[0], shape, dtype, size, raw_dtype=types[how.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(np.array(factors, dtype=np.float32))
    for move in moves:
        (made,) = move.save([state[name].float().cpu() for name in move.ours])
        how = _stored_as(tuple(made.shape), move.theirs[0], kind)
        if how == "f16" and made.abs().max() > LARGEST_F16:
            raise InputError(f"{move.theirs[0]} holds numbers beyond what f16 can say; write kind='f32'")
        writer.write_tensor_data(quants.quantize(made.contiguous().numpy(), types[how.upper()]))
    writer.close()


def _stored_as(shape: tuple[int, ...], name: str, kind: str) -> str:
    """Vectors and positions stay exact, as llama.cpp expects; a row that is no whole number of blocks is f16."""
    if len(shape) < 2 or name.startswith("position_embd"):
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % 32 else kind
