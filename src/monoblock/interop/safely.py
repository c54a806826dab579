"""safetensors as data from a stranger: a header is checked, all of it, before anything is made of the bytes behind it.

    weights = open_weights(folder)            # model.safetensors, or the shards of model.safetensors.index.json
    weights.shapes["lm_head.weight"]          # known from the headers alone
    weights["lm_head.weight"]                 # a tensor over the mapped file: read when it is used

Refused: a header larger than 16 MB or than its file, more than 100,000 tensors, bytes claimed twice or by nobody, a
shape that is not as many bytes, an unknown dtype, a shard outside the folder, a tensor missing or in two shards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from monoblock.config import ModelConfig
from monoblock.errors import FileError
from monoblock.untrusted import MB, inside, parse_json, present, read_json, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_HEADER = 16 * MB
MOST_TENSORS = 100_000
MOST_SHARDS = 2_000
MOST_AXES = 8
MOST_ELEMENTS = 2**48
LONGEST_NAME = 512
_DRAWING = threading.Lock()

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """A tensor as a header describes it; `start` and `end` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def on_meta(make: Callable[[Any], Any], config: Any, tensors: int) -> Any:
    """A model without weights, unless its configuration lies: a deep enough one takes long to build even so."""
    stacks = config.stacks.values() if isinstance(config, ModelConfig) else ()
    apart = [stack for stack in stacks if not any(run.tied for run in stack.pattern)]
    depth = sum(run.times * len(run.blocks) for stack in apart for run in stack.pattern)
    if depth > tensors:
        raise FileError(f"its configuration says {depth:,} layers, and there are {tensors:,} tensors")
    try:
        with torch.device("meta"), _undrawn():
            return make(config)
    except (RuntimeError, TypeError, OverflowError):
        raise FileError("its configuration says sizes that no model has") from None


@contextmanager
def _undrawn() -> Iterator[None]:
    """torch's layers draw first weights of their own; where there is no memory to draw into, that only costs time."""
    with _DRAWING:
        kept = {name: getattr(nn.init, name) for name in ("kaiming_uniform_", "uniform_", "normal_")}
        try:
            for name, function in kept.items():
                setattr(nn.init, name, partial(_drawn, function))
            yield
        finally:
            for name, function in kept.items():
                setattr(nn.init, name, function)


def _drawn(function: Callable[..., Tensor], tensor: Tensor, *given: Any, **named: Any) -> Tensor:
    return tensor if tensor.is_meta else function(tensor, *given, **named)


# -- one file ----------------------------------------------------------------------------------------------------------


def read_header(path: str | Path) -> dict[str, Stored]:
    """Name -> what is stored, from the checked header of a safetensors file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + 2:
                raise FileError(f"{path} is no safetensors file: it has {size} bytes")
            if length > min(LARGEST_HEADER, size - 8):
                limit = f"the file has {size:,}" if length > size - 8 else f"at most {LARGEST_HEADER:,} are read"
                raise FileError(f"{path} is damaged: its header claims {length:,} bytes, and {limit}")
            raw = file.read(length)
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if not raw.startswith(b"{"):
        raise FileError(f"{path} is no safetensors file: its header is not JSON")
    if raw.count(b'"dtype"') > MOST_TENSORS:
        raise FileError(f"{path} claims more than {MOST_TENSORS:,} tensors")
    header = parse_json(raw, f"{path}: the header", most=16 * MOST_TENSORS, deepest=4)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path} is damaged: its __metadata__ is no table of texts")
    if len(header) > MOST_TENSORS:
        raise FileError(f"{path} holds {len(header):,} tensors; at most {MOST_TENSORS:,} are read")
    entries = {name: _stored(path, name, entry) for name, entry in header.items()}
    _check_bytes(path, entries, size - 8 - length)
    return entries


def _stored(path: str | Path, name: str, entry: Any) -> Stored:
    def wrong(why: str) -> FileError:
        return FileError(f"{path} is damaged: {shown(name)} {why}")

    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise FileError(f"{path} is damaged: {shown(name)} is no name of a tensor")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"is stored as {shown(dtype)}, which is none of {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise wrong(f"has the shape {shown(shape)}; a shape is at most {MOST_AXES} whole numbers")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"lies at {shown(offsets)}, which is no range of bytes")
    elements = 1
    for axis in shape:
        elements *= axis
        if elements > MOST_ELEMENTS:
            raise wrong(f"has the shape {shown(shape)}, which is more than any file holds")
    if elements * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        bytes_ = offsets[1] - offsets[0]
        raise wrong(f"has the shape {shown(shape)} in {dtype}, and {bytes_:,} bytes are not as many")
    return Stored(DTYPES[dtype], tuple(shape), *offsets)


def _counts(value: Any) -> bool:
    """Whether this is a list of whole numbers a file could have; True is none, though Python says so."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MOST_ELEMENTS * 8 for one in value)


def _check_bytes(path: str | Path, entries: Mapping[str, Stored], size: int) -> None:
    """Raise unless the tensors lie end to end and fill the file: every byte belongs to exactly one of them."""
    reached = 0
    for name, stored in sorted(entries.items(), key=lambda row: (row[1].start, row[1].end)):
        if stored.start != reached:
            what = "overlaps another tensor" if stored.start < reached else "leaves bytes before it that are nobody's"
            raise FileError(f"{path} is damaged: {shown(name)} {what}")
        reached = stored.end
    if reached > size:
        raise FileError(f"{path} is cut short: its tensors need {reached:,} bytes, and {size:,} are there")
    if reached < size:
        raise FileError(f"{path} is damaged: {size - reached:,} bytes at its end are nobody's")


# -- a folder ----------------------------------------------------------------------------------------------------------


class Weights(Mapping[str, Tensor]):
    """The tensors of one or several safetensors files by name, each mapped from its file when it is asked for.

    What is given is a view of the file, on the CPU; `.to(dtype)` or `.clone()` makes it one's own.
    """

    def __init__(self, files: list[Path]) -> None:
        self.file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self.stored: dict[str, Stored] = {}
        for path in files:
            entries = read_header(path)
            twice = next((name for name in entries if name in self.stored), None)
            if twice is not None:
                raise FileError(f"{shown(twice)} is stored twice, in {self.file_of[twice].name} and {path.name}")
            self.stored |= entries
            self.file_of |= dict.fromkeys(entries, path)
            if len(self.stored) > MOST_TENSORS:
                raise FileError(f"{path.parent} holds more than {MOST_TENSORS:,} tensors")

    def __getitem__(self, name: str) -> Tensor:
        path = self.file_of[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise FileError(f"{path} cannot be read: {' '.join(str(problem).split())[:120]}") from None
        if (tensor.dtype, tuple(tensor.shape)) != self.stored[name][:2]:
            raise FileError(f"{path} changed while it was being read")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.stored.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: stored.dtype for name, stored in self.stored.items()}

    @property
    def nbytes(self) -> int:
        return sum(stored.end - stored.start for stored in self.stored.values())


def open_weights(folder: str | Path) -> Weights:
    """The weights of a folder: the shards of its index where there is one, else model.safetensors."""
    if present(folder, INDEX):
        return _sharded(folder)
    if present(folder, WEIGHTS):
        return Weights([inside(folder, WEIGHTS)])
    other = next((name for name in sorted(_names(folder)) if name.endswith((".bin", ".pt", ".pth", ".ckpt"))), None)
    if other is not None:
        raise FileError(
            f"{folder} has no {WEIGHTS}; {other} is a pickle: write monoblock convert {folder} --to FOLDER first"
        )
    raise FileError(f"{folder} has no {WEIGHTS}")


def _names(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _sharded(folder: str | Path) -> Weights:
    index = inside(folder, INDEX)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FileError(f"{index} has no weight_map")
    files = list(dict.fromkeys(shown(place) if not isinstance(place, str) else place for place in places.values()))
    if len(files) > MOST_SHARDS:
        raise FileError(f"{index} names {len(files):,} files; at most {MOST_SHARDS:,} are read")
    odd = next((name for name in files if not name.endswith(".safetensors")), None)
    if odd is not None:
        raise FileError(f"{index} names {shown(odd)}, which is no safetensors file")
    weights = Weights([inside(folder, name) for name in files])
    for name, place in places.items():
        found = weights.file_of.get(name)
        if found is None or found.name != place:
            raise FileError(f"{index} says that {shown(name)} is in {shown(place)}, and it is not")
    extra = next((name for name in weights if name not in places), None)
    if extra is not None:
        raise FileError(f"{index} does not list {shown(extra)}, which {weights.file_of[extra].name} holds")
    return weights
