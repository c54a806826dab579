"""Checkpoints that several processes write together, each its own part of the weights and optimizer states.

    step-400/shard-00000.safetensors   the parts that process 0 stores, and so on
    step-400/shards.json               the shape of every tensor, and the file and position of each of its parts

torch.distributed.checkpoint plans who writes and reads what, so a run can be resumed with another strategy and on
another number of processes, also from a checkpoint of a single process. The files are safetensors and JSON; the
protocol is that of training/checkpoint.py.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from monoblock.errors import FileError
from monoblock.parallel.world import World
from monoblock.training import checkpoint
from monoblock.untrusted_files import open_to_write, read_json, reading

INDEX_FILE = "shards.json"
SHARED_GROUPS = ("model", "optimizer", "average")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.int64, torch.int32, torch.uint8)}
Groups = Mapping[str, Mapping[str, Tensor]]
T = TypeVar("T")


class Part(NamedTuple):
    """A part of a tensor: its offsets and sizes in each dimension, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: one that no checkpoint has
    parts: list[Part]


# -- writing ------------------------------------------------------------------------------------------------------


class StagedParts(NamedTuple):
    """What this process writes of a checkpoint: its parts of the shared tensors, the index, and the rest."""

    tensors: dict[str, Tensor]  # by their key in the file
    places: dict[str, Any]  # the content of the index; empty in all processes but the main one
    rest: checkpoint.Checkpoint  # written by the main process


def stage(
    state: checkpoint.Checkpoint, world: World, copy_part: Callable[[str, Tensor], Tensor] | None = None
) -> StagedParts:
    """Plan who writes what, and collect the parts of this process in CPU memory; every process must call this.

    copy_part: a function that copies a tensor with a name; by default a part may share memory with the weights.
    """
    shared = {name: state.tensors[name] for name in SHARED_GROUPS if name in state.tensors}
    rest = {name: tensors for name, tensors in state.tensors.items() if name not in shared}
    writer = _Writer(world.rank, copy_part or (lambda name, tensor: tensor.cpu().contiguous()))
    tensors = {f"{group}/{name}": tensor for group, named in shared.items() for name, tensor in named.items()}
    _run_together(world, lambda: dcp.save(cast(dict[str, Any], tensors), storage_writer=writer))
    return StagedParts(writer.tensors, writer.index, checkpoint.Checkpoint(state.step, rest, state.metadata))


def write(folder: Path, staged: StagedParts, world: World, **retention: Any) -> Path:
    """Write the staged parts of all processes; every process must call this."""
    step = staged.rest.step
    _run_together(world, lambda: checkpoint.begin(folder, step) if world.is_main else None)
    try:
        temporary = checkpoint.temporary_folder(folder, step)
        own = _run_together(world, lambda: dict(_write_parts(temporary, staged, world.rank)))
        entries: list[dict[str, Any]] = [{} for _ in range(world.size)]
        dist.all_gather_object(entries, own, group=world.group)
        files = {name: entry for part in entries for name, entry in part.items()}
        _run_together(
            world, lambda: checkpoint.finish(folder, staged.rest, files=files, **retention) if world.is_main else None
        )
    except FileError:
        if world.is_main:
            checkpoint.abandon(folder, step)
        raise
    return folder / f"step-{step}"


def _run_together(world: World, action: Callable[[], T]) -> T:
    """Run an action in every process; if it fails in one, raise FileError in all."""
    result, problem = None, None
    try:
        result = action()
    except (OSError, FileError, CheckpointException, SafetensorError) as error:
        problem = error
    if not any(world.all_reduce_sum(problem is not None)):
        return cast(T, result)
    if isinstance(problem, FileError):
        raise problem
    reason = "another process failed" if problem is None else str(problem).strip().splitlines()[-1]
    raise FileError(f"the checkpoint cannot be written: {reason}; earlier checkpoints are untouched")


def _write_parts(folder: Path, staged: StagedParts, rank: int) -> Iterable[tuple[str, dict[str, Any]]]:
    """Write the parts of this process; return the manifest entries of the files that it has written."""
    if staged.tensors:
        path = folder / shard_name(rank)
        checkpoint.fault_injection_point(f"tensors {path.name}")
        open_to_write(path).close()  # save_file itself would follow a link
        save_file(staged.tensors, path)
        checkpoint.sync_file(path)
        yield path.name, checkpoint.describe_file(path)
    if staged.places:
        checkpoint.write_and_sync(folder / INDEX_FILE, json.dumps(staged.places).encode())
        yield INDEX_FILE, checkpoint.describe_file(folder / INDEX_FILE)


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


class _Writer(dcp.StorageWriter):
    """A storage of torch.distributed.checkpoint that collects what one safetensors file and the index will contain."""

    def __init__(self, rank: int, copy_part: Callable[[str, Tensor], Tensor]) -> None:
        self.file, self.copy_part = shard_name(rank), copy_part
        self.tensors: dict[str, Tensor] = {}
        self.index: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensor = self.copy_part(key, cast(Tensor, planner.resolve_data(item)).detach())
            self.tensors[key] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, (self.file, key)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for rank in results for r in rank}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            parts = [[list(c.offsets), list(c.sizes), *places[name, tuple(c.offsets)]] for c in entry.chunks]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            self.index[name] = {"shape": list(entry.size), "dtype": dtype, "parts": parts}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


# -- reading ------------------------------------------------------------------------------------------------------


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Return what a checkpoint stores, by "<group>/<name>"; a tensor of a single-process checkpoint is one part."""
    with reading(path):
        files = checkpoint.list_files(path)
        headers = {(file, key): entry for file in files for key, entry in _read_header(path / file)}
        if INDEX_FILE not in files:
            return {f"{Path(file).stem}/{key}": _whole(file, key, *entry) for (file, key), entry in headers.items()}
        index = {}
        for name, entry in read_json(path / INDEX_FILE).items():
            parts = [Part(tuple(offsets), tuple(sizes), file, key) for offsets, sizes, file, key in entry["parts"]]
            index[name] = StoredTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]], parts)
            if not _is_complete(index[name], headers):
                raise FileError(f"{path / INDEX_FILE} does not say where all parts of {name!r} are; delete {path}")
        return index


def _read_header(file: Path) -> Iterable[tuple[str, tuple[tuple[int, ...], torch.dtype | None]]]:
    """Yield the name of each tensor in a file with its shape and dtype; None is a dtype that no checkpoint has."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # not a dict
                header = tensors.get_slice(key)
                yield key, (tuple(header.get_shape()), checkpoint.SAFETENSORS_DTYPES.get(header.get_dtype()))


def _whole(file: str, key: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> StoredTensor:
    return StoredTensor(shape, dtype, [Part((0,) * len(shape), shape, file, key)])


def _is_complete(tensor: StoredTensor, headers: Mapping[tuple[str, str], Any]) -> bool:
    """Return whether the parts of a tensor are stored as the index says, and fill it without overlap."""
    for number, part in enumerate(tensor.parts):
        is_inside = len(part.offsets) == len(part.sizes) == len(tensor.shape) and all(
            type(n) is int and n >= 0 for n in (*part.offsets, *part.sizes, *tensor.shape)
        )
        if not is_inside or headers.get((part.file, part.key)) != (part.sizes, tensor.dtype):
            return False
        if any(o + s > n for o, s, n in zip(part.offsets, part.sizes, tensor.shape, strict=True)):
            return False
        if any(map(functools.partial(_overlap, part), tensor.parts[:number])):
            return False
    return sum(math.prod(part.sizes) for part in tensor.parts) == math.prod(tensor.shape)


def _overlap(one: Part, other: Part) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides)


def check_tensors(
    path: Path,
    index: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[Sequence[int], torch.dtype]],
    is_other: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise FileError unless a checkpoint has exactly the expected tensors, with their shapes and dtypes.

    is_other: whether a name may be stored that is not expected, because another process has it.
    """
    advice = "delete this checkpoint, or start a new run with --out"
    for name, (shape, dtype) in expected.items():
        if name not in index:
            raise FileError(f"{path} has no tensor {name!r}, which this run needs; {advice}")
        stored = index[name]
        if stored.shape != tuple(shape) or stored.dtype != dtype:
            raise FileError(
                f"{path} has {name!r} with shape {stored.shape} and {_dtype_name(stored.dtype)}, but this run has "
                f"{tuple(shape)} and {_dtype_name(dtype)}; {advice}"
            )
    unknown = next((name for name in index if name not in expected and not is_other(name)), None)
    if unknown is not None:
        raise FileError(f"{path} has {unknown!r}, which this run does not have; {advice}")


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "another dtype" if dtype is None else str(dtype).removeprefix("torch.")


def load_into(path: Path, index: Mapping[str, StoredTensor], targets: Groups) -> None:
    """Copy stored tensors into `targets`, each process its part; every process must call this."""
    tensors = {f"{group}/{name}": tensor for group, named in targets.items() for name, tensor in named.items()}
    check_tensors(path, index, {name: (t.shape, t.dtype) for name, t in tensors.items()}, lambda name: True)
    dcp.load(cast(dict[str, Any], tensors), storage_reader=_Reader(path, index))


def load(path: Path) -> checkpoint.Checkpoint:
    """Load a checkpoint with whole tensors, whoever wrote it."""
    if INDEX_FILE not in checkpoint.list_files(path):
        return checkpoint.load(path)
    with reading(path):
        rest = load_rest(path)
        return checkpoint.Checkpoint(rest.step, {**rest.tensors, **assemble(path)}, rest.metadata)


def load_rest(path: Path) -> checkpoint.Checkpoint:
    """Load a checkpoint without the tensors that the processes share."""
    tensors = checkpoint.load_tensors(path, lambda group: group not in SHARED_GROUPS and not group.startswith("shard-"))
    return checkpoint.Checkpoint(checkpoint.parse_step(path), tensors, checkpoint.load_metadata(path))


def assemble(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return the whole tensors of a checkpoint that several processes wrote, by group and name."""
    groups: dict[str, dict[str, Tensor]] = {}
    for full_name, stored in read_index(path).items():
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        for part in stored.parts:
            with safe_open(path / part.file, framework="pt") as tensors:
                slices = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
                tensor[slices].copy_(tensors.get_tensor(part.key))
        group, name = full_name.split("/", 1)
        groups.setdefault(group, {})[name] = tensor
    return groups


class _Reader(dcp.StorageReader):
    """A storage of torch.distributed.checkpoint that reads safetensors files."""

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.folder, self.index = folder, index

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for name, stored in self.index.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.parts]
            assert stored.dtype is not None  # checked
            properties = TensorProperties(dtype=stored.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
        places: dict[Any, Any] = {
            MetadataIndex(name, torch.Size(part.offsets)): part
            for name, stored in self.index.items()
            for part in stored.parts
        }
        return Metadata(entries, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part: Part = self.places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            with safe_open(self.folder / part.file, framework="pt") as tensors:
                ranges = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                stored = tensors.get_slice(part.key)[ranges] if ranges else tensors.get_tensor(part.key)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
