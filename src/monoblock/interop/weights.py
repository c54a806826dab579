"""Read and write weights as safetensors; the header of an untrusted file is checked before any tensor is read.

    weights = ModelFolder(path).weights       # model.safetensors, or the shards of model.safetensors.index.json
    weights.shapes["lm_head.weight"]          # known from the headers alone
    weights["lm_head.weight"]                 # a tensor in the memory-mapped file: its bytes are read when it is used

The safetensors library refuses bytes that belong to two tensors or to none, and a shape that does not match the number
of bytes.  Refused here, because the library accepts them: a header larger than MAX_HEADER_BYTES, too many tensors, a
key that occurs twice, odd names and dtypes, a shard outside the folder, a tensor that is missing or stored twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """One tensor as described in a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    if not isinstance(metadata, dict) or len(header) > MAX_TENSORS:
        raise FileError(
            f"{path} is damaged: its __metadata__ is no object, or it has more than {MAX_TENSORS:,} tensors"
        )
    _open_safetensors(path)  # checks types, sizes and offsets
    entries = {}
    for name, entry in header.items():
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise FileError(f"{path} is damaged: {short_repr(name)} is not a valid tensor name")
        if set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in DTYPES:
            known = f"dtype, shape and data_offsets, with a dtype among {', '.join(DTYPES)}"
            raise FileError(f"{path}: {short_repr(name)} is described by {short_repr(entry)}; it must have {known}")
        if len(entry["shape"]) > MAX_DIMS or max(entry["shape"], default=0) > MAX_ELEMENTS:
            raise FileError(f"{path} is damaged: {short_repr(name)} has the shape {short_repr(entry['shape'])}")
        entries[name] = SafetensorsEntry(DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return entries


def _open_safetensors(path: str | Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise FileError(f"{path} is damaged or incomplete ({reason}); download or copy it again") from None


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
        if path not in self._open_files:
            self._open_files[path] = _open_safetensors(path)
        try:
            tensor: Tensor = self._open_files[path].get_tensor(name)
        except (SafetensorError, OSError):
            tensor = torch.empty(0, device="meta")
        if tensor.is_meta or (tensor.dtype, tuple(tensor.shape)) != self.entries[name]:
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
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def reopen(self) -> SafetensorsWeights:
        """Return the same weights with files that are mapped again on access; the headers are not read again."""
        reopened = SafetensorsWeights([])
        reopened.file_of, reopened.entries = self.file_of, self.entries
        return reopened


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


# -- under which names weights are stored -----------------------------------------------------------------------------

Tensors = Sequence[Tensor]


class AttentionShape(NamedTuple):
    """The sizes of an attention layer, which a transform needs to split or join its weights."""

    heads: int = 1
    kv_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1


class TensorTransform(NamedTuple):
    """A function that converts the tensors of a family to ours, and its inverse."""

    to_ours: Callable[[Tensors, AttentionShape], Tensors]
    to_theirs: Callable[[Tensors, AttentionShape], Tensors]


class TensorMapping(NamedTuple):
    """A rule applied to one layer of one model: our names, the family's names and the transform between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: TensorTransform | None
    shape: AttentionShape

    def load(self, tensors: Tensors) -> Tensors:
        return tensors if self.transform is None else self.transform.to_ours(tensors, self.shape)

    def save(self, tensors: Tensors) -> Tensors:
        return tensors if self.transform is None else self.transform.to_theirs(tensors, self.shape)


def same_names(names: Iterable[str]) -> list[TensorMapping]:
    """Return the mappings of weights that are stored under our names."""
    return [TensorMapping((name,), (name,), None, AttentionShape()) for name in names]


# -- reading the weights of a model ------------------------------------------------------------------------------------


REMAP_BYTES = 2**22  # least number of bytes read through a mapping before it is reopened
REMAPS_PER_MODEL = 32  # about how often a large file is mapped again
TensorFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def read_weights(
    model: nn.Module, mappings: Iterable[TensorMapping], names: Mapping[str, str], reader: Any, mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Return the weights of a model on the meta device, or the parts of this process; `mappings` say where they are.

    names: the names of tensors in the file, by those in the mappings.
    reader: its method `load` reads tensors and transforms them, as that of `WeightReader` does.
    mesh: processes that share every matrix; the model is split among them.
    """
    shapes, state = {key: tensor.shape for key, tensor in model.state_dict().items()}, dict[str, Tensor]()
    parts = None
    if mesh is not None:
        from monoblock.parallel.inference import TensorParts  # torch.distributed.tensor takes long to import

        parts = TensorParts(model, mesh)

    def convert(mapping: TensorMapping, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = mapping.load(stored)
        for key, tensor in zip(mapping.ours, tensors, strict=True):
            if tensor.shape != shapes[key]:
                difference = f"{tuple(tensor.shape)} as {key}, but the configuration requires {tuple(shapes[key])}"
                raise FileError(f"{short_repr(names[mapping.theirs[0]])} has shape {difference}")
        return tensors if parts is None else parts.select(mapping.ours, tensors)

    for mapping in mappings:
        tensors = reader.load([names[key] for key in mapping.theirs], partial(convert, mapping))
        for key, tensor in zip(mapping.ours, tensors, strict=True):
            state[key] = tensor if parts is None else parts.join(key, tensor)
    return state


def check_names(
    stored: Mapping[str, str], required: Collection[str], optional: Collection[str] = (), hint: str = ""
) -> None:
    """Raise FileError unless all `required` tensors are stored, and no others except `optional` ones.

    stored: the names of tensors in the file, by those in `required` and `optional`.
    hint: what the message about others ends with.
    """
    missing = [name for name in required if name not in stored]
    unexpected = sorted(name for key, name in stored.items() if key not in required and key not in optional)
    if missing or unexpected:
        names = unexpected or missing
        problem = "has a tensor that the model does not use" if unexpected else "lacks the tensor"
        rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise FileError(f"it {problem}: {short_repr(names[0])}{rest}{hint if unexpected else ''}")


class WeightReader:
    """Read stored tensors, transform them and convert them to one dtype on one device."""

    def __init__(self, weights: SafetensorsWeights, dtype: torch.dtype, device: str = "cpu") -> None:
        self.weights, self.dtype, self.device = weights, dtype, torch.device(device)
        self.temporary_weights, self.bytes_read = weights.reopen(), 0
        self.remap_bytes = max(REMAP_BYTES, weights.nbytes // REMAPS_PER_MODEL)

    def load(self, keys: Sequence[str], transform: TensorFunction) -> Sequence[Tensor]:
        """Apply `transform` to the tensors with these names; return its results in `self.dtype` on `self.device`."""
        for key in keys:
            dtype = self.weights.entries[key].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise FileError(f"{short_repr(key)} has dtype {dtype}, but weights must be floating-point")
        tensors = self._read_tensors(self.temporary_weights, keys, transform)
        if len(keys) > 1:  # the transform has copied the tensors to new memory
            converted = [without_rest(t).to(self.device, self.dtype).contiguous() for t in tensors]
            self._count_bytes(sum(tensor.nbytes for tensor in tensors))
            return converted
        on_cpu = self.device.type == "cpu"
        if all(on_cpu and tensor.dtype == self.dtype and tensor.is_contiguous() for tensor in tensors):
            return self._read_tensors(self.weights, keys, transform)  # views of the mapped file
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
            self.temporary_weights, self.bytes_read = self.weights.reopen(), 0

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


def without_rest(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps no memory in use but its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# -- writing -----------------------------------------------------------------------------------------------------------


MAX_SHARD_SIZE = 5 * 10**9  # bytes; a larger tensor gets a file of its own


def save_weights(
    folder: Path,
    state: Mapping[str, Tensor],
    mappings: Iterable[TensorMapping],
    dtype: torch.dtype | None,
    max_shard_size: int,
    omitted_prefix: str = "",
) -> None:
    """Write the weights `state` to one file, or to several files of at most `max_shard_size` bytes each.

    Each is transformed and converted when its file is written, so that the model is never copied as a whole.

    mappings: under which names.
    dtype: that of floating-point weights in the files; None to keep theirs.
    omitted_prefix: is left out of the names.
    """

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    shards: list[list[TensorMapping]] = []
    shard_sizes: list[int] = []
    for mapping in mappings:
        size = sum(convert(state[name].to("meta")).nbytes for name in mapping.ours)
        if not shards or shard_sizes[-1] + size > max_shard_size:
            shards.append([])
            shard_sizes.append(0)
        shards[-1].append(mapping)
        shard_sizes[-1] += size
    count, weight_map = len(shards), dict[str, str]()
    names = [WEIGHTS_FILE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        tensors = dict[str, Tensor]()
        for mapping in shard:
            saved = mapping.save([state[ours].detach() for ours in mapping.ours])
            for theirs, tensor in zip(mapping.theirs, saved, strict=True):
                tensors[theirs.removeprefix(omitted_prefix)] = convert(tensor).contiguous()
        write_safetensors(folder / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if count > 1:
        index = {"metadata": {"total_size": sum(shard_sizes)}, "weight_map": dict(sorted(weight_map.items()))}
        with open_to_write(folder / f"{INDEX_FILE}.tmp") as file:
            file.write(json.dumps(index, indent=2).encode() + b"\n")
        names.append(INDEX_FILE)
    for name in names:
        commit_file(folder / name)
    # Files of an earlier save could be read instead.
    for path in (folder / INDEX_FILE, folder / WEIGHTS_FILE, *folder.glob("model-?????-of-?????.safetensors")):
        if path.name not in names:
            path.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the file PATH.tmp, which `commit_file` renames."""
    temporary = path.with_name(f"{path.name}.tmp")
    open_to_write(temporary).close()  # save_file itself would follow a link
    save_file(dict(tensors), temporary, metadata=dict(metadata))


def commit_file(path: Path) -> None:
    """Flush the file PATH.tmp to disk, then rename it to PATH; a crash leaves either the old or the new file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
