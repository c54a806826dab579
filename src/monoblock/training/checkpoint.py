"""Checkpoints that survive a kill at any moment: written beside, synced, hashed, renamed, and only then `latest`.

    checkpoints/step-400/   the files of one state, and manifest.json with their sizes and SHA-256
    checkpoints/latest      the word "step-400", replaced atomically once step-400 is safe on disk

A state is named tensors and one JSON object; safetensors and JSON only, optimizer and random states too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from monoblock.errors import FileError

MANIFEST, LATEST, FACTS = "manifest.json", "latest", "state.json"
LARGEST_JSON = 64 * 2**20


@dataclass(frozen=True)
class State:
    """What a checkpoint holds: groups of tensors by file name ("model", "optimizer", …) and plain facts."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


def reached(point: str) -> None:
    """Called before every write, sync and rename of a save; tests put a fault here."""


# -- writing ------------------------------------------------------------------------------------------------------


def save(folder: Path, state: State, *, keep: int = 3, best: int | None = None) -> Path:
    """Write a checkpoint, make it `latest`, then drop all but the last `keep` and the best."""
    place, beside = folder / f"step-{state.step}", folder / f"step-{state.step}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        reached("make")
        beside.mkdir()
        sizes = dict(_write_files(beside, state))
        _write(beside / MANIFEST, json.dumps({"step": state.step, "files": sizes}, indent=2).encode())
        _sync(beside)
        _put(beside, place)
        reached("latest")
        _write(folder / f"{LATEST}.tmp", place.name.encode())
        os.replace(folder / f"{LATEST}.tmp", folder / LATEST)
        _sync(folder)
        reached("prune")
        _prune(folder, keep, {state.step, best})
    except OSError as problem:
        raise FileError(
            f"the checkpoint of step {state.step} cannot be written to {folder}: {problem.strerror or problem}; "
            f"earlier checkpoints are untouched"
        ) from None
    return place


def _write_files(folder: Path, state: State) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tensors in state.tensors.items():
        path = folder / f"{name}.safetensors"
        reached(f"tensors {name}")
        try:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
        except SafetensorError as problem:  # it wraps what the disk said
            raise OSError(str(problem)) from None
        _sync(path)
        yield path.name, _described(path)
    reached("facts")
    _write(folder / FACTS, json.dumps(dict(state.facts)).encode())
    yield FACTS, _described(folder / FACTS)


def _write(path: Path, data: bytes) -> None:
    reached(f"write {path.name}")
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make sure of a file, or of the names in a folder."""
    reached(f"sync {path.name}")
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _put(beside: Path, place: Path) -> None:
    """Rename into place; a checkpoint of the same step that is in the way is moved aside first."""
    reached("rename")
    stale = place.with_suffix(".stale")
    shutil.rmtree(stale, ignore_errors=True)
    if place.exists():
        os.rename(place, stale)
        reached("between renames")
    os.rename(beside, place)
    _sync(place.parent)
    shutil.rmtree(stale, ignore_errors=True)


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _prune(folder: Path, keep: int, never: set[int | None]) -> None:
    for step in steps(folder)[:-keep] if keep else []:
        if step not in never:
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)


# -- reading ------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """The steps there are checkpoints of, oldest first; unfinished ones do not count."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def problem_with(place: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    try:
        if (place / MANIFEST).stat().st_size > LARGEST_JSON:
            return f"{place / MANIFEST} is too large"
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, wanted in files.items():
            if Path(name).name != name:
                return f"{place / MANIFEST} names a file outside its folder"
            if not (place / name).is_file():
                return f"{place / name} is missing"
            if _described(place / name) != wanted:
                return f"{place / name} is damaged: its size or hash is not the manifest's"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return f"{place / MANIFEST} cannot be read: {problem}"
    return None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be trusted, and what had to be passed over to find it."""
    named = folder / LATEST
    first = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
    order = [f"step-{step}" for step in reversed(steps(folder))]
    if first in order:  # one that was finished but not yet named is as good: training reached it
        newer = order[: order.index(first)]
        order = [*newer, first, *order[order.index(first) + 1 :]]
    passed_over: list[str] = []
    for name in order:
        problem = problem_with(folder / name)
        if problem is None:
            return folder / name, passed_over
        passed_over.append(problem)
    return None, passed_over


def load(place: Path) -> State:
    """Read a checkpoint that `problem_with` has nothing against."""
    facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
    try:
        tensors = {path.stem: load_file(path) for path in sorted(place.glob("*.safetensors"))}
    except SafetensorError as problem:
        raise FileError(f"{place} cannot be read: {problem}") from None
    return State(step=int(place.name.removeprefix("step-")), tensors=tensors, facts=facts)
