"""Read and write weights as safetensors; the header of an untrusted file is checked before any tensor is read.

    weights = ModelFolder(path).weights       # model.safetensors, or the shards of model.safetensors.index.json
    weights.shapes["lm_head.weight"]          # known from the headers alone
    weights["lm_head.weight"]                 # a tensor in the memory-mapped file: its bytes are read when it is used

These files are refused: a header larger than the file or than MAX_HEADER_BYTES, too many tensors, bytes that belong to
two tensors or to none, a shape that does not match the number of bytes, an unknown dtype, a shard outside the folder, a
tensor that is missing or stored in two shards.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.errors import FileError
from monoblock.untrusted_files import MB, Folder, open_to_write, parse_json, safe_join, short_repr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 16 * MB
MAX_TENSORS = 100_000
MAX_SHARDS = 2_000
MAX_DIMS = 8
MAX_ELEMENTS = 2**48
MAX_NAME_LENGTH = 512
_INIT_LOCK = threading.Lock()

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


class SafetensorsEntry(NamedTuple):
    """One tensor as described in a header; `start` and `end` are byte offsets from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def build_on_meta(factory: Callable[[Any], Any], config: Any, tensor_count: int) -> Any:
    """Build a model on the meta device, without weights; raise FileError if it has more layers than stored tensors."""
    stacks = config.stacks.values() if isinstance(config, ModelConfig) else ()
    untied = [stack for stack in stacks if not any(repeat.tied for repeat in stack.pattern)]
    depth = sum(repeat.times * len(repeat.blocks) for stack in untied for repeat in stack.pattern)
    if depth > tensor_count:
        raise FileError(f"its configuration has {depth:,} layers, but only {tensor_count:,} tensors are stored")
    try:
        with torch.device("meta"), _skip_random_init():
            return factory(config)
    except (RuntimeError, TypeError, OverflowError):
        raise FileError("its configuration has sizes for which no model can be built") from None


@contextmanager
def _skip_random_init() -> Iterator[None]:
    """Skip the random initialization of layers on the meta device, where it takes time without effect."""
    with _INIT_LOCK:
        originals = {name: getattr(nn.init, name) for name in ("kaiming_uniform_", "uniform_", "normal_")}
        try:
            for name, function in originals.items():
                setattr(nn.init, name, partial(_init_unless_meta, function))
            yield
        finally:
            for name, function in originals.items():
                setattr(nn.init, name, function)


def _init_unless_meta(function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor if tensor.is_meta else function(tensor, *args, **kwargs)


# -- one file ----------------------------------------------------------------------------------------------------------


def read_header(path: str | Path) -> dict[str, SafetensorsEntry]:
    """Read and check the header of a safetensors file; return its entries by tensor name."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + 2:
                raise FileError(f"{path} is not a safetensors file: it has only {size} bytes, too few for a header")
            if length > min(MAX_HEADER_BYTES, size - 8):
                limit = f"the file has only {size:,}" if length > size - 8 else f"the limit is {MAX_HEADER_BYTES:,}"
                raise FileError(f"{path} is damaged: its header claims {length:,} bytes, but {limit}")
            raw = file.read(length)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    if not raw.startswith(b"{"):
        raise FileError(f"{path} is not a safetensors file: its header is not JSON")
    if raw.count(b'"dtype"') > MAX_TENSORS:
        raise FileError(f"{path} is damaged: its header describes more than {MAX_TENSORS:,} tensors")
    header = parse_json(raw, f"{path}: the header", max_values=16 * MAX_TENSORS, max_depth=4)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path} is damaged: its __metadata__ does not map strings to strings")
    if len(header) > MAX_TENSORS:
        raise FileError(f"{path} has {len(header):,} tensors, but the limit is {MAX_TENSORS:,}")
    entries = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_offsets(path, entries, size - 8 - length)
    return entries


def _parse_entry(path: str | Path, name: str, entry: Any) -> SafetensorsEntry:
    def damaged(reason: str) -> FileError:
        return FileError(f"{path} is damaged: {short_repr(name)} {reason}")

    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise damaged("is not a valid tensor name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(f"is stored as {short_repr(dtype)}, which is none of {', '.join(DTYPES)}")
    if not _is_size_list(shape) or len(shape) > MAX_DIMS:
        raise damaged(f"has the shape {short_repr(shape)}; a shape is at most {MAX_DIMS} whole numbers")
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has the offsets {short_repr(offsets)}, which are not a range of bytes")
    elements = 1
    for axis in shape:
        elements *= axis
        if elements > MAX_ELEMENTS:
            raise damaged(f"has the shape {short_repr(shape)}, which is too large for any file")
    nbytes = offsets[1] - offsets[0]
    if elements * DTYPES[dtype].itemsize != nbytes:
        raise damaged(
            f"has the shape {short_repr(shape)} and dtype {dtype}, but the file stores {nbytes:,} bytes for it"
        )
    return SafetensorsEntry(DTYPES[dtype], tuple(shape), *offsets)


def _is_size_list(value: Any) -> bool:
    """Return whether a value is a list of whole numbers of plausible size; `type(size) is int` excludes True."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_ELEMENTS * 8 for size in value)


def _check_offsets(path: str | Path, entries: Mapping[str, SafetensorsEntry], size: int) -> None:
    """Raise FileError unless every byte after the header belongs to exactly one tensor."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            problem = "overlaps another tensor" if entry.start < end else "leaves unused bytes before it"
            raise FileError(f"{path} is damaged: {short_repr(name)} {problem}")
        end = entry.end
    if end > size:
        raise FileError(f"{path} is cut short: its tensors need {end:,} bytes, but it has only {size:,}")
    if end < size:
        raise FileError(f"{path} is damaged: {size - end:,} bytes at its end belong to no tensor")


# -- a folder ----------------------------------------------------------------------------------------------------------


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files by name.

    A tensor is a view of the memory-mapped file, on the CPU; `.to(dtype)` or `.clone()` copies it.
    """

    def __init__(self, files: list[Path]) -> None:
        self.file_of: dict[str, Path] = {}
        self._open_files: dict[Path, Any] = {}
        self.entries: dict[str, SafetensorsEntry] = {}
        for path in files:
            entries = read_header(path)
            repeated = next((name for name in entries if name in self.entries), None)
            if repeated is not None:
                locations = f"{self.file_of[repeated].name} and {path.name}"
                raise FileError(f"{short_repr(repeated)} is stored twice, in {locations}; remove one of them")
            self.entries |= entries
            self.file_of |= dict.fromkeys(entries, path)
            if len(self.entries) > MAX_TENSORS:
                raise FileError(f"{path.parent} has more than {MAX_TENSORS:,} tensors, which is the limit")

    def __getitem__(self, name: str) -> Tensor:
        path = self.file_of[name]
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            tensor: Tensor = self._open_files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FileError(f"{path} cannot be read: {' '.join(str(error).split())[:120]}") from None
        if (tensor.dtype, tuple(tensor.shape)) != self.entries[name][:2]:
            raise FileError(f"{path} changed while it was being read; load it again")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: entry.dtype for name, entry in self.entries.items()}

    @property
    def nbytes(self) -> int:
        return sum(entry.end - entry.start for entry in self.entries.values())


def open_weights(folder: Folder) -> SafetensorsWeights:
    """Open the weights of a folder: the shards of its index if there is one, else model.safetensors."""
    path = folder.path
    if folder.has(INDEX_FILE):
        return _open_shards(folder)
    if folder.has(WEIGHTS_FILE):
        return SafetensorsWeights([safe_join(path, WEIGHTS_FILE)])
    pickles = [file.name for file in path.glob("*") if file.suffix in PICKLE_SUFFIXES]
    if pickles:
        hint = f"{min(pickles)} is a pickle: write monoblock convert {path} --to FOLDER first"
        raise FileError(f"{path} has no {WEIGHTS_FILE}; {hint}")
    raise FileError(f"{path} has no {WEIGHTS_FILE}, the file with the weights of a model")


def _open_shards(folder: Folder) -> SafetensorsWeights:
    index = folder.path / INDEX_FILE
    weight_map = folder.read_json(INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{index} has no weight_map, which lists the file of each tensor")
    files = list(dict.fromkeys(file if isinstance(file, str) else short_repr(file) for file in weight_map.values()))
    if len(files) > MAX_SHARDS:
        raise FileError(f"{index} lists {len(files):,} files, but the limit is {MAX_SHARDS:,}")
    foreign = next((file for file in files if not file.endswith(".safetensors")), None)
    if foreign is not None:
        raise FileError(f"{index} lists {short_repr(foreign)}, which is not a safetensors file")
    weights = SafetensorsWeights([safe_join(folder.path, file) for file in files])
    for name, file in weight_map.items():
        path = weights.file_of.get(name)
        if path is None or path.name != file:
            raise FileError(f"{index} lists {short_repr(name)} in {short_repr(file)}, but the tensor is not there")
    extra = next((name for name in weights if name not in weight_map), None)
    if extra is not None:
        raise FileError(f"{index} does not list {short_repr(extra)}, but {weights.file_of[extra].name} contains it")
    return weights


# -- reading in a chosen dtype -----------------------------------------------------------------------------------------


REMAP_BYTES = 2**22  # least number of bytes read through a mapping before it is reopened
REMAPS_PER_MODEL = 32  # about how often a large file is mapped again
TensorFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _reopen(weights: SafetensorsWeights) -> SafetensorsWeights:
    """Return the same weights with files that are mapped again on access; the headers are not read again."""
    reopened = copy.copy(weights)
    reopened._open_files = {}
    return reopened


def without_rest(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps no memory in use but its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class WeightReader:
    """Read stored tensors, transform them and convert them to one dtype on one device."""

    def __init__(self, weights: SafetensorsWeights, dtype: torch.dtype, device: str = "cpu") -> None:
        self.weights, self.dtype, self.device = weights, dtype, torch.device(device)
        self.temporary_weights, self.bytes_read = _reopen(weights), 0
        self.remap_bytes = max(REMAP_BYTES, weights.nbytes // REMAPS_PER_MODEL)

    def load(self, keys: Sequence[str], transform: TensorFunction = identity) -> Sequence[Tensor]:
        """Apply `transform` to the tensors with these names; return its results in `self.dtype` on `self.device`."""
        for key in keys:
            dtype = self.weights.entries[key].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise FileError(f"{short_repr(key)} has dtype {dtype}, but weights must be floating-point")
        tensors = self._read_tensors(self.temporary_weights, keys, transform)
        if len(keys) == 1 and all(self._can_be_view(tensor) for tensor in tensors):
            return self._read_tensors(self.weights, keys, transform)
        if len(keys) > 1:  # the transform has copied the tensors to new memory
            converted = [without_rest(t).to(self.device, self.dtype).contiguous() for t in tensors]
            self._count_bytes(sum(tensor.nbytes for tensor in tensors))
            return converted
        shapes = [tensor.shape for tensor in tensors]
        del tensors
        return [self._load_by_rows(keys, transform, index, shape) for index, shape in enumerate(shapes)]

    def _load_by_rows(self, keys: Sequence[str], transform: TensorFunction, index: int, shape: torch.Size) -> Tensor:
        """Return result number `index` of the transform, which has this shape, converted a block of rows at a time."""
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        size = self.weights.entries[keys[0]].dtype.itemsize * shape.numel()
        rows = max(1, self.remap_bytes * shape[0] // size) if shape.numel() else 1
        for start in range(0, shape[0], rows):
            block = self._read_tensors(self.temporary_weights, keys, transform)[index][start : start + rows]
            result[start : start + rows].copy_(block)
            self._count_bytes(block.nbytes)
        return result

    def _count_bytes(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self.bytes_read > self.remap_bytes:
            self.temporary_weights, self.bytes_read = _reopen(self.weights), 0

    def _can_be_view(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.dtype and self.device.type == "cpu" and tensor.is_contiguous()

    @staticmethod
    def _read_tensors(weights: SafetensorsWeights, keys: Sequence[str], transform: TensorFunction) -> Sequence[Tensor]:
        tensors = [weights[key] for key in keys]
        try:
            return transform(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:100]
            raise FileError(
                f"{short_repr(keys[0])} of shape {weights.shapes[keys[0]]} does not fit the configuration: {reason}"
            ) from None


# -- the parts of weights that a process reads -------------------------------------------------------------------------


class WeightParts(Protocol):
    def select(self, names: Sequence[str], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return views of the parts of these weights that this process stores."""
        ...

    def join(self, name: str, part: Tensor) -> Tensor:
        """Return a part, in its final dtype and on its device, as what the model stores under this name."""
        ...


class WholeWeights:
    def select(self, names: Sequence[str], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights

    def join(self, name: str, part: Tensor) -> Tensor:
        return part


def split_weights(model: nn.Module, mesh: DeviceMesh | None) -> WeightParts:
    """Split a model on the meta device among the processes of a mesh, before its weights are read."""
    if mesh is None:
        return WholeWeights()
    from monoblock.parallel.inference import TensorParts  # torch.distributed.tensor takes long to import

    return TensorParts(model, mesh)


# -- writing -----------------------------------------------------------------------------------------------------------


MAX_SHARD_SIZE = 5 * 10**9  # bytes; a larger tensor gets a file of its own
TensorFactory = Callable[[], Tensor]  # called when the tensor is written, so that the model is not copied


def save_weights(
    folder: Path, factories: Sequence[Mapping[str, TensorFactory]], sizes: Mapping[str, int], max_shard_size: int
) -> None:
    """Write tensors to one file, or to several files of at most `max_shard_size` bytes each.

    factories: functions that return the tensors, by name; the tensors of one mapping are written to the same file.
    sizes: the size of each tensor in bytes, by name.
    """
    shards: list[list[Mapping[str, TensorFactory]]] = [[]]
    shard_size = 0
    for group in factories:
        size = sum(sizes[name] for name in group)
        if shards[-1] and shard_size + size > max_shard_size:
            shards.append([])
            shard_size = 0
        shards[-1].append(group)
        shard_size += size
    count = len(shards)
    names = [WEIGHTS_FILE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for name, groups in zip(names, shards, strict=True):
        tensors = {key: factory().detach().contiguous() for group in groups for key, factory in group.items()}
        open_to_write(folder / f"{name}.tmp").close()  # save_file itself would follow a link
        save_file(tensors, folder / f"{name}.tmp", metadata={"format": "pt"})
    if count > 1:
        weight_map = {
            key: name for name, groups in zip(names, shards, strict=True) for group in groups for key in group
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        with open_to_write(folder / f"{INDEX_FILE}.tmp") as file:
            file.write(json.dumps(index, indent=2).encode() + b"\n")
        names.append(INDEX_FILE)
    for name in names:
        commit_file(folder / name)
    _remove_stale_files(folder, set(names))


def commit_file(path: Path) -> None:
    """Flush the file PATH.tmp to disk, then rename it to PATH; a crash leaves either the old or the new file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _remove_stale_files(folder: Path, current: set[str]) -> None:
    """Delete weights files of an earlier save that are not in `current`, since they could be read instead."""
    for path in (folder / INDEX_FILE, folder / WEIGHTS_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        if path.name not in current:
            path.unlink(missing_ok=True)


# -- digests -----------------------------------------------------------------------------------------------------------


def compute_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, dtypes and values of tensors; their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(data)
    return digest.hexdigest()


def compute_body_digest(model: nn.Module) -> str:
    """Return the digest of all weights except those of the head, since an adapter may come with its own head."""
    return compute_digest({name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")})
