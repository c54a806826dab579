"""Crash-safe checkpoints: write to a temporary folder, sync, hash, rename, and only then update `latest`.

    checkpoints/step-400/   the files of one checkpoint, and manifest.json with their sizes and SHA-256
    checkpoints/latest      the text "step-400", replaced atomically once step-400 is on disk

A checkpoint consists of named tensors and one JSON object, stored as safetensors and JSON, never pickled. What is
deleted later is what its manifest lists, and no link is followed: others may have put files there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from monoblock.errors import FileError
from monoblock.untrusted_files import open_to_write, read_text, reading, safe_join

MANIFEST_FILE, LATEST_FILE, METADATA_FILE = "manifest.json", "latest", "state.json"
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


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint, grouped by file ("model", "optimizer", …), and its JSON metadata."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Any]


def fault_injection_point(point: str) -> None:
    """Do nothing. `save` calls this before every write, sync and rename; tests replace it to inject faults."""


# -- writing ------------------------------------------------------------------------------------------------------


def save(folder: Path, checkpoint: Checkpoint, **retention: Any) -> Path:
    """Write a checkpoint, make it `latest`, delete old checkpoints, and return the path of the new one.

    retention: the arguments of `finish` that say which checkpoints are kept.
    """
    begin(folder, checkpoint.step)
    return finish(folder, checkpoint, **retention)


def temporary_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.tmp"


def begin(folder: Path, step: int) -> None:
    """Make the temporary folder in which the files of a checkpoint are written."""
    with _abandon_on_error(folder, step):
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _restore_stale(folder)
        _delete(temporary_folder(folder, step))
        fault_injection_point("make")
        temporary_folder(folder, step).mkdir()


def finish(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    files: Mapping[str, Any] | None = None,
    keep: int = 3,
    best: int | None = None,
    last_good: int | None = None,
    save_every: int = 0,
) -> Path:
    """Write the files of a checkpoint and the manifest, rename the temporary folder, and delete old checkpoints.

    The last `keep` checkpoints are kept (all if `keep` is 0), and also those of two steps: `best`, which has the best
    evaluation so far, and `last_good`, to which the run would roll back. Earlier checkpoints at steps that are not
    multiples of `save_every` were written at an interruption; they are deleted too, so that the folder looks like that
    of an uninterrupted run.

    files: the manifest entries of files that are in the temporary folder already.
    """
    step = checkpoint.step
    path, temporary = folder / f"step-{step}", temporary_folder(folder, step)
    with _abandon_on_error(folder, step):
        entries = {**(files or {}), **dict(_write_files(temporary, checkpoint))}
        write_and_sync(temporary / MANIFEST_FILE, json.dumps({"step": step, "files": entries}, indent=2).encode())
        sync_file(temporary)
        _rename_into_place(temporary, path)
        fault_injection_point("latest")
        write_and_sync(folder / f"{LATEST_FILE}.tmp", path.name.encode())
        fault_injection_point("name")
        os.replace(folder / f"{LATEST_FILE}.tmp", folder / LATEST_FILE)
        sync_file(folder)
        fault_injection_point("prune")
        _prune(folder, step, keep, (best, last_good), save_every)
    return path


def abandon(folder: Path, step: int) -> None:
    """Delete a checkpoint that cannot be finished, which frees space if the disk is full."""
    _delete(temporary_folder(folder, step))
    _restore_stale(folder)


@contextmanager
def _abandon_on_error(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        abandon(folder, step)
        raise FileError(
            f"the checkpoint of step {step} cannot be written to {folder}: {problem.strerror or problem}; "
            f"earlier checkpoints are untouched"
        ) from None


def _write_files(folder: Path, checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write all files of a checkpoint but the manifest; yield the name of each with its entry in the manifest."""
    for name, tensors in checkpoint.tensors.items():
        path = folder / f"{name}.safetensors"
        fault_injection_point(f"tensors {name}")
        try:
            open_to_write(path).close()
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
        except SafetensorError as problem:  # safetensors wraps an OSError in it
            raise OSError(str(problem)) from None
        sync_file(path)
        yield path.name, describe_file(path)
    fault_injection_point("facts")
    write_and_sync(folder / METADATA_FILE, json.dumps(dict(checkpoint.metadata)).encode())
    yield METADATA_FILE, describe_file(folder / METADATA_FILE)


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


def check_folder(folder: Path) -> None:
    """Raise FileError if the folder of the checkpoints is a link: what is saved and deleted would be elsewhere."""
    if folder.is_symlink():
        raise FileError(f"{folder} is a link; put the folder itself there, or make the whole run folder a link")


def _restore_stale(folder: Path) -> None:
    """Move back the checkpoints that were moved aside by a save that was interrupted between its two renames."""
    for stale in _own_folders(folder, UNFINISHED_FOLDER):
        if stale.suffix == ".stale" and not os.path.lexists(stale.with_suffix("")):
            with suppress(OSError):
                os.rename(stale, stale.with_suffix(""))


def _own_folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the folders, not links, whose whole name matches a pattern."""
    return [p for p in folder.glob("step-*") if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


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


def list_files(path: Path) -> list[str]:
    """Return the names of the files of a checkpoint, without the manifest that lists them."""
    files = _read_json(path / MANIFEST_FILE).get("files")
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise FileError(f"{path / MANIFEST_FILE} does not list the files of its folder")
    return list(files)


def describe_file(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


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


# -- reading ------------------------------------------------------------------------------------------------------


def list_steps(folder: Path) -> list[int]:
    """List the steps of finished checkpoints in ascending order."""
    return sorted(parse_step(path) for path in _own_folders(folder, STEP_FOLDER))


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


def find_newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint (or None) and the problems of newer checkpoints and of the file `latest`."""
    check_folder(folder)
    _restore_stale(folder)
    names = [f"step-{step}" for step in reversed(list_steps(folder))]
    problems = _check_latest_file(folder / LATEST_FILE, names)
    for name in names:  # the newest checkpoint may be complete although `latest` does not name it yet
        problem = find_problem(folder / name)
        if problem is None:
            return folder / name, problems
        problems.append(problem)
    return None, problems


def _check_latest_file(latest: Path, names: list[str]) -> list[str]:
    """Return a list with the problem of the file `latest`, if it has one.

    The file may be unreadable, or name a checkpoint that does not exist.
    """
    try:
        if not os.path.lexists(latest):  # the first save was interrupted
            return []
        name = read_text(safe_join(latest.parent, latest.name), MAX_LATEST_BYTES).strip()
    except (OSError, ValueError):
        return [f"{latest} cannot be read"]
    return [] if name in names else [f"{latest} names {name[:80]!r}, which does not exist"]


def load(path: Path) -> Checkpoint:
    """Load a checkpoint in which `find_problem` finds no problem."""
    return Checkpoint(parse_step(path), load_tensors(path, lambda group: True), load_metadata(path))


def load_tensors(path: Path, is_wanted: Callable[[str], bool]) -> dict[str, dict[str, Tensor]]:
    """Load the tensors of the groups of a checkpoint that are wanted."""
    names = [name for name in list_files(path) if name.endswith(".safetensors") and is_wanted(Path(name).stem)]
    with reading(path):
        return {Path(name).stem: load_file(path / name) for name in names}


def load_metadata(path: Path) -> dict[str, Any]:
    """Load the metadata of a checkpoint without its tensors."""
    return _read_json(path / METADATA_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `save` wrote; it may contain Infinity, the best loss before the first evaluation."""
    with reading(path):
        data = json.loads(read_text(safe_join(path.parent, path.name), MAX_JSON_BYTES))
    if not isinstance(data, dict):
        raise FileError(f"{path} does not contain a JSON object")
    return data


def parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
