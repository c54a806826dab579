"""Crash-safe checkpoints: write to a temporary folder, sync, hash, rename, and only then update `latest`.

    checkpoints/step-400/   the files of one checkpoint, and manifest.json with their sizes and SHA-256
    checkpoints/latest      the text "step-400", replaced atomically once step-400 is on disk

A checkpoint consists of named tensors and one JSON object, stored as safetensors and JSON, never pickled. What is
deleted later is what its manifest lists, and no link is followed: others may have put files there.

If the processes of a run share the weights, each writes its own part of the weights and optimizer states:

    step-400/shard-00000.safetensors   the parts that process 0 stores, and so on
    step-400/shards.json               the shape of every tensor, and the file and position of each of its parts

torch.distributed.checkpoint plans who writes and reads what, so a run can be resumed with another strategy and on
another number of processes, also from a checkpoint of a single process.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
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
from monoblock.parallel.strategy import Strategy
from monoblock.parallel.world import SINGLE_PROCESS, World
from monoblock.training.events import CheckpointEvent
from monoblock.untrusted_files import open_to_write, read_json, read_text, reading, safe_join

MANIFEST_FILE, LATEST_FILE, METADATA_FILE, INDEX_FILE = "manifest.json", "latest", "state.json", "shards.json"
SHARED_GROUPS = ("model", "optimizer", "average")  # the groups of tensors that may be split among processes
MAX_JSON_BYTES = 64 * 2**20
MAX_LATEST_BYTES = 1024
STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})", re.ASCII)
WRITTEN_FILE = re.compile(r"[a-z0-9-]+\.safetensors|[a-z]+\.json", re.ASCII)
UNFINISHED_FOLDER = re.compile(rf"{STEP_FOLDER.pattern}\.(tmp|stale)", re.ASCII)
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_DTYPES.values()}
ADVICE = "delete this checkpoint, or start a new run with --out"
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint, grouped by file ("model", "optimizer", …), and its JSON metadata."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Any]


def fault_injection_point(point: str) -> None:
    """Do nothing. It is called before every write, sync and rename; tests replace it to inject faults."""


# -- when checkpoints are written: during the step that saves, or in a thread ------------------------------------------


class CheckpointSaver:
    """Save the checkpoints of a run, in the background if `in_background`; every process must call every method.

    In the background, the weights and optimizer states are copied to CPU memory during the step, and a thread writes
    the copies while training continues. The next save waits for the thread. With several processes, the threads have a
    process group of their own, so that what they exchange does not mix with the training.
    """

    def __init__(self, folder: Path, strategy: Strategy, *, in_background: bool = False) -> None:
        self.folder, self.strategy, self.in_background = folder, strategy, in_background
        # Without parts to agree on, the main process writes alone.
        self._world = strategy.world if strategy.is_sharded else SINGLE_PROCESS
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._step = 0  # which the thread writes
        self._error: BaseException | None = None  # of the thread

    def save(self, state: Checkpoint, **retention: Any) -> Iterator[CheckpointEvent]:
        """Write a checkpoint, or begin to; yield an event for each that is complete.

        retention: the arguments of `write` that say which checkpoints are kept.
        """
        yield from self.wait()
        self._step = state.step
        staged: StagedFiles | None = None
        if self.strategy.is_sharded or self.strategy.world.is_main:
            copy_tensor = self._copies.copy if self.in_background else None
            staged = stage(self.folder, state, self._world, copy_tensor, in_parts=self.strategy.is_sharded)
        if not self.in_background:
            if staged is not None:
                write(self.folder, staged, self._world, **retention)
            yield self._event()
            return
        self._copies.synchronize()
        if self._world.size > 1 and self._world.group is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._world.timeout))
            self._world = dataclasses.replace(self._world, group=group)

        def run() -> None:
            try:
                if staged is not None:
                    write(self.folder, staged, self._world, **retention)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> Iterator[CheckpointEvent]:
        """Yield an event if the thread has completed a checkpoint since the last call."""
        if self._thread is not None and not self._thread.is_alive() and self._error is None:
            yield from self.wait()

    def wait(self) -> Iterator[CheckpointEvent]:
        """Wait until the thread has written its checkpoint; raise its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        yield self._event()

    def _event(self) -> CheckpointEvent:
        return CheckpointEvent(self._step, self.folder / f"step-{self._step}")

    @property
    def has_failed(self) -> bool:
        """Whether the thread of this process could not write a checkpoint."""
        return self._error is not None

    def raise_error_if(self, failed: float) -> None:
        """Raise the error of the thread if `has_failed` is true in any process."""
        if failed:
            list(self.wait())
            raise FileError("another process could not write a checkpoint; earlier checkpoints are untouched")

    @contextmanager
    def finish_on_error(self) -> Iterator[None]:
        """Let the thread complete its checkpoint if the `with` block fails, unless it was interrupted by Ctrl-C."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            if self._thread is not None:
                self._thread.join()
            raise


class HostCopies:
    """Copies of tensors in CPU memory, which is allocated once; on a machine with a GPU it is pinned."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._is_asynchronous = False

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor; the copy is complete after `synchronize`, and valid until the next one of this name."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        self._is_asynchronous |= tensor.is_cuda
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        if self._is_asynchronous:
            torch.cuda.synchronize()


# -- writing ------------------------------------------------------------------------------------------------------


class StagedFiles(NamedTuple):
    """What this process writes of a checkpoint: the content of its files by their names."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    objects: Mapping[str, Any]


def save(folder: Path, state: Checkpoint, **retention: Any) -> Path:
    """Write a checkpoint in a single process, and return its path; `retention` is that of `write`."""
    return write(folder, stage(folder, state), **retention)


def stage(
    folder: Path,
    state: Checkpoint,
    world: World = SINGLE_PROCESS,
    copy_tensor: Callable[[str, Tensor], Tensor] | None = None,
    *,
    in_parts: bool = False,
) -> StagedFiles:
    """Plan who writes what, and collect what this process writes; every process must call this.

    copy_tensor: a function that copies a tensor with a name; by default what is staged shares memory with the weights.
    in_parts: whether each process has a part of the tensors in SHARED_GROUPS.
    """
    copy_tensor = copy_tensor or (lambda name, tensor: tensor)
    tensors: dict[str, dict[str, Tensor]] = {}
    objects: dict[str, Any] = {}
    shared = [group for group in SHARED_GROUPS if in_parts and group in state.tensors]
    if in_parts:
        named = {f"{group}/{name}": tensor for group in shared for name, tensor in state.tensors[group].items()}
        writer = _PartWriter(f"shard-{world.rank:05d}.safetensors", copy_tensor)
        save_parts = lambda: dcp.save(cast(dict[str, Any], named), storage_writer=writer)
        _run_together(world, folder, state.step, save_parts)
        tensors |= {writer.file: writer.tensors} if writer.tensors else {}
        objects |= {INDEX_FILE: writer.index} if writer.index else {}  # which the main process has
    if world.is_main:
        for group in (group for group in state.tensors if group not in shared):
            copies = {name: copy_tensor(f"{group}/{name}", tensor) for name, tensor in state.tensors[group].items()}
            tensors[f"{group}.safetensors"] = copies
        objects[METADATA_FILE] = copy.deepcopy(dict(state.metadata))
    return StagedFiles(state.step, tensors, objects)


def write(
    folder: Path,
    staged: StagedFiles,
    world: World = SINGLE_PROCESS,
    *,
    keep: int = 3,
    best: int | None = None,
    last_good: int | None = None,
    save_every: int = 0,
) -> Path:
    """Write a checkpoint, make it `latest`, delete old checkpoints, and return its path; every process must call this.

    The last `keep` checkpoints are kept (all if `keep` is 0), and also those of two steps: `best`, which has the best
    evaluation so far, and `last_good`, to which the run would roll back. Earlier checkpoints at steps that are not
    multiples of `save_every` were written at an interruption; they are deleted too, so that the folder looks like that
    of an uninterrupted run.
    """
    path, temporary = folder / f"step-{staged.step}", folder / f"step-{staged.step}.tmp"

    def begin() -> None:
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _restore_stale(folder)
        _delete(temporary)
        fault_injection_point("make")
        temporary.mkdir()

    def finish() -> None:
        files = {name: entry for part in entries for name, entry in part.items()}
        write_and_sync(temporary / MANIFEST_FILE, json.dumps({"step": staged.step, "files": files}, indent=2).encode())
        sync_file(temporary)
        _rename_into_place(temporary, path)
        fault_injection_point("latest")
        write_and_sync(folder / f"{LATEST_FILE}.tmp", path.name.encode())
        fault_injection_point("name")
        os.replace(folder / f"{LATEST_FILE}.tmp", folder / LATEST_FILE)
        sync_file(folder)
        fault_injection_point("prune")
        _prune(folder, staged.step, keep, (best, last_good), save_every)

    _run_together(world, folder, staged.step, begin if world.is_main else None)
    own = _run_together(world, folder, staged.step, lambda: _write_files(temporary, staged))
    entries: list[Any] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(entries, own, group=world.group)
    _run_together(world, folder, staged.step, finish if world.is_main else None)
    return path


def _run_together(world: World, folder: Path, step: int, action: Callable[[], T] | None) -> T:
    """Run an action, if this process has one; if it fails in any process, delete what was written and raise FileError.

    Deleting the unfinished checkpoint frees space if the disk is full.
    """
    result, problem = None, None
    try:
        result = None if action is None else action()
    except (OSError, FileError, CheckpointException, SafetensorError) as error:
        problem = error
    if not any(world.all_reduce_sum(problem is not None)):
        return cast(T, result)
    if world.is_main and not folder.is_symlink():
        _delete(folder / f"step-{step}.tmp")
        _restore_stale(folder)
    if isinstance(problem, FileError):
        raise problem
    reason = "another process failed" if problem is None else str(problem).strip().splitlines()[-1]
    reason = getattr(problem, "strerror", None) or reason
    raise FileError(
        f"the checkpoint of step {step} cannot be written to {folder}: {reason}; earlier checkpoints are untouched"
    )


def _write_files(folder: Path, staged: StagedFiles) -> dict[str, dict[str, Any]]:
    """Write the files of this process; return the entry of each in the manifest."""
    for name, tensors in staged.tensors.items():
        fault_injection_point(f"tensors {name.removesuffix('.safetensors')}")
        open_to_write(folder / name).close()  # save_file itself would follow a link
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
        sync_file(folder / name)
    for name, value in staged.objects.items():
        write_and_sync(folder / name, json.dumps(value).encode())
    return {name: describe_file(folder / name) for name in (*staged.tensors, *staged.objects)}


def describe_file(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_and_sync(path: Path, data: bytes) -> None:
    fault_injection_point(f"write {path.name}")
    with open_to_write(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    fault_injection_point(f"sync {path.name}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_into_place(temporary: Path, path: Path) -> None:
    """Rename a finished checkpoint; an existing checkpoint of the same step is moved aside first."""
    fault_injection_point("rename")
    stale = path.with_suffix(".stale")
    _delete(stale)
    if path.exists():
        os.rename(path, stale)
        fault_injection_point("between renames")
    os.rename(temporary, path)
    sync_file(path.parent)
    _delete(stale)


def _restore_stale(folder: Path) -> None:
    """Move back the checkpoints that were moved aside by a save that was interrupted between its two renames."""
    for stale in _own_folders(folder, UNFINISHED_FOLDER):
        if stale.suffix == ".stale" and not os.path.lexists(stale.with_suffix("")):
            with suppress(OSError):
                os.rename(stale, stale.with_suffix(""))


def _prune(folder: Path, last: int, keep: int, protected: tuple[int | None, ...], save_every: int) -> None:
    """Delete checkpoints up to step `last` that are neither among the last `keep` nor protected.

    Checkpoints after `last` are left alone: they must be damaged, otherwise training would have resumed from them.
    """
    steps = [step for step in list_steps(folder) if step <= last]
    regular = [step for step in steps if step == last or not save_every or step % save_every == 0]
    for step in steps:
        if step not in regular[-keep:] and step not in protected:  # with keep=0 this slice has all regular steps
            _delete(folder / f"step-{step}")
    for unfinished in _own_folders(folder, UNFINISHED_FOLDER):
        _delete(unfinished)


def _delete(path: Path) -> None:
    """Delete the files that the manifest of a checkpoint lists, then the manifest, and the folder if that was all.

    A save that was interrupted has no manifest yet; what it may have written is deleted.
    """
    if path.is_symlink() or not path.is_dir():
        return
    try:
        names = list_files(path)
    except FileError:
        names = [file.name for file in path.iterdir() if path.suffix == ".tmp" and WRITTEN_FILE.fullmatch(file.name)]
    with suppress(OSError):
        for name in (*names, MANIFEST_FILE):
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _own_folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the folders, not links, whose whole name matches a pattern."""
    return [p for p in folder.glob("step-*") if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


# -- finding a checkpoint ------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise FileError if the folder of the checkpoints is a link: what is saved and deleted would be elsewhere."""
    if folder.is_symlink():
        raise FileError(f"{folder} is a link; put the folder itself there, or make the whole run folder a link")


def list_steps(folder: Path) -> list[int]:
    """List the steps of finished checkpoints in ascending order."""
    return sorted(parse_step(path) for path in _own_folders(folder, STEP_FOLDER))


def parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint (or None) and the problems of newer checkpoints and of the file `latest`."""
    check_folder(folder)
    _restore_stale(folder)
    names = [f"step-{step}" for step in reversed(list_steps(folder))]
    latest, problems = folder / LATEST_FILE, list[str]()
    if os.path.lexists(latest):  # else the first save was interrupted
        try:
            name = read_text(safe_join(folder, LATEST_FILE), MAX_LATEST_BYTES).strip()
            problems += [] if name in names else [f"{latest} names {name[:80]!r}, which does not exist"]
        except (OSError, ValueError):
            problems.append(f"{latest} cannot be read")
    for name in names:  # the newest checkpoint may be complete although `latest` does not name it yet
        problem = find_problem(folder / name)
        if problem is None:
            return folder / name, problems
        problems.append(problem)
    return None, problems


def find_problem(path: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None if it is intact."""
    try:
        manifest = _read_json(path / MANIFEST_FILE)
        files: dict[str, dict[str, Any]] = manifest["files"]
        if METADATA_FILE not in files:
            return f"{path / MANIFEST_FILE} does not list {METADATA_FILE}"
        if manifest["step"] != parse_step(path):
            return f"{path / MANIFEST_FILE} belongs to step {manifest['step']}"
        for name, expected in files.items():
            if Path(name).name != name or (path / name).is_symlink():
                return f"{path / MANIFEST_FILE} lists a file outside its folder"
            if not (path / name).is_file():
                return f"{path / name} is missing"
            if describe_file(path / name) != expected:
                return f"{path / name} is damaged: its size or hash differs from the manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"{path / MANIFEST_FILE} cannot be read: {problem}"
    return None


def list_files(path: Path) -> list[str]:
    """Return the names of the files of a checkpoint, without the manifest that lists them."""
    files = _read_json(path / MANIFEST_FILE).get("files")
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise FileError(f"{path / MANIFEST_FILE} does not list the files of its folder")
    return list(files)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write` wrote; it may contain Infinity, the best loss before the first evaluation."""
    with reading(path):
        data = json.loads(read_text(safe_join(path.parent, path.name), MAX_JSON_BYTES))
    if not isinstance(data, dict):
        raise FileError(f"{path} does not contain a JSON object")
    return data


# -- reading a checkpoint in which `find_problem` finds no problem -----------------------------------------------------


def load(path: Path) -> Checkpoint:
    """Load a checkpoint with whole tensors, whoever wrote it."""
    groups = load_tensors(path, lambda group: True)
    if INDEX_FILE in list_files(path):
        shards = {f"{group}.safetensors": groups.pop(group) for group in list(groups) if group.startswith("shard-")}
        with reading(path):
            for full_name, stored in read_index(path).items():
                group, name = full_name.split("/", 1)
                whole = groups.setdefault(group, {})[name] = torch.empty(stored.shape, dtype=stored.dtype)
                for part in stored.parts:
                    whole[_slices(part.offsets, part.sizes)].copy_(shards[part.file].pop(part.key))
    return Checkpoint(parse_step(path), groups, load_metadata(path))


def load_rest(path: Path) -> Checkpoint:
    """Load a checkpoint without the tensors that the processes share."""
    tensors = load_tensors(path, lambda group: group not in SHARED_GROUPS and not group.startswith("shard-"))
    return Checkpoint(parse_step(path), tensors, load_metadata(path))


def load_tensors(path: Path, is_wanted: Callable[[str], bool]) -> dict[str, dict[str, Tensor]]:
    """Load the tensors of the files of a checkpoint that are wanted, by the names of the files without suffix."""
    names = [name for name in list_files(path) if name.endswith(".safetensors") and is_wanted(Path(name).stem)]
    with reading(path):
        return {Path(name).stem: load_file(path / name) for name in names}


def load_metadata(path: Path) -> dict[str, Any]:
    """Load the metadata of a checkpoint without its tensors."""
    return _read_json(path / METADATA_FILE)


def load_into(path: Path, index: Mapping[str, StoredTensor], targets: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy stored tensors into `targets`, each process its part; every process must call this."""
    tensors = {f"{group}/{name}": tensor for group, named in targets.items() for name, tensor in named.items()}
    check_tensors(path, index, {name: (t.shape, t.dtype) for name, t in tensors.items()}, lambda name: True)
    dcp.load(cast(dict[str, Any], tensors), storage_reader=_PartReader(path, index))


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


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Return what a checkpoint stores, by "<group>/<name>"; a tensor of a single-process checkpoint is one part."""
    with reading(path):
        files = list_files(path)
        headers: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype | None]] = {}
        for file in (file for file in files if file.endswith(".safetensors")):
            with safe_open(path / file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  # not a dict
                    header = tensors.get_slice(key)
                    headers[file, key] = tuple(header.get_shape()), SAFETENSORS_DTYPES.get(header.get_dtype())
        if INDEX_FILE not in files:
            return {
                f"{Path(file).stem}/{key}": StoredTensor(shape, dtype, [Part((0,) * len(shape), shape, file, key)])
                for (file, key), (shape, dtype) in headers.items()
            }
        index = {}
        for name, entry in read_json(path / INDEX_FILE).items():
            parts = [Part(tuple(offsets), tuple(sizes), file, key) for offsets, sizes, file, key in entry["parts"]]
            index[name] = StoredTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]], parts)
            if not _is_complete(index[name], headers):
                raise FileError(f"{path / INDEX_FILE} does not say where all parts of {name!r} are; delete {path}")
        return index


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
        for other in tensor.parts[:number]:
            sides = zip(part.offsets, part.sizes, other.offsets, other.sizes, strict=True)
            if all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
                return False
    return sum(math.prod(part.sizes) for part in tensor.parts) == math.prod(tensor.shape)


def check_tensors(
    path: Path,
    index: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[Sequence[int], torch.dtype]],
    is_other: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise FileError unless a checkpoint has exactly the expected tensors, with their shapes and dtypes.

    is_other: whether a name may be stored that is not expected, because another process has it.
    """
    describe = lambda dtype: "another dtype" if dtype is None else str(dtype).removeprefix("torch.")
    for name, (shape, dtype) in expected.items():
        if name not in index:
            raise FileError(f"{path} has no tensor {name!r}, which this run needs; {ADVICE}")
        stored = index[name]
        if stored.shape != tuple(shape) or stored.dtype != dtype:
            raise FileError(
                f"{path} has {name!r} with shape {stored.shape} and {describe(stored.dtype)}, but this run has "
                f"{tuple(shape)} and {describe(dtype)}; {ADVICE}"
            )
    unknown = next((name for name in index if name not in expected and not is_other(name)), None)
    if unknown is not None:
        raise FileError(f"{path} has {unknown!r}, which this run does not have; {ADVICE}")


# -- the storage that torch.distributed.checkpoint writes to and reads from --------------------------------------------


class _Storage:
    """What torch.distributed.checkpoint asks of a storage, and a folder of safetensors files does without."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _PartWriter(_Storage, dcp.StorageWriter):
    """Collect what one safetensors file and the index will contain."""

    def __init__(self, file: str, copy_tensor: Callable[[str, Tensor], Tensor]) -> None:
        self.file, self.copy_tensor = file, copy_tensor
        self.tensors: dict[str, Tensor] = {}
        self.index: dict[str, Any] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensor = self.copy_tensor(key, cast(Tensor, planner.resolve_data(item)).detach())
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


class _PartReader(_Storage, dcp.StorageReader):
    """Read the parts of tensors that a process needs from safetensors files."""

    def __init__(self, folder: Path, index: Mapping[str, StoredTensor]) -> None:
        self.folder, self.index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for name, stored in self.index.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.parts]
            assert stored.dtype is not None  # checked
            properties = TensorProperties(dtype=stored.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
            places |= {MetadataIndex(name, torch.Size(part.offsets)): part for part in stored.parts}
        return Metadata(entries, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part: Part = self.places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            with safe_open(self.folder / part.file, framework="pt") as tensors:
                ranges = _slices(item.storage_offsets, item.lengths)
                stored = tensors.get_slice(part.key)[ranges] if ranges else tensors.get_tensor(part.key)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
