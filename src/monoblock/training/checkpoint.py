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
from contextlib import suppress
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


def save(
    folder: Path,
    state: State,
    *,
    keep: int = 3,
    best: int | None = None,
    sound: int | None = None,
    every: int = 0,
) -> Path:
    """Write a checkpoint, make it `latest`, then drop all but the last `keep`, the best, and the last sound one.

    One of a step between two multiples of `every` was left by an interruption and goes, too: what stays is then what a
    run never stopped would have.
    """
    place, beside = folder / f"step-{state.step}", folder / f"step-{state.step}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _bring_back(folder)
        shutil.rmtree(beside, ignore_errors=True)
        reached("make")
        beside.mkdir()
        sizes = dict(_write_files(beside, state))
        _write(beside / MANIFEST, json.dumps({"step": state.step, "files": sizes}, indent=2).encode())
        _sync(beside)
        _put(beside, place)
        reached("latest")
        _write(folder / f"{LATEST}.tmp", place.name.encode())
        reached("name")
        os.replace(folder / f"{LATEST}.tmp", folder / LATEST)
        _sync(folder)
        reached("prune")
        _prune(folder, state.step, keep, (best, sound), every)
    except OSError as problem:
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the room
        _bring_back(folder)
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


def _bring_back(folder: Path) -> None:
    """A save that ended between its two renames has left a checkpoint moved aside: it goes back to its place."""
    for stale in folder.glob("step-*.stale"):
        if not stale.with_suffix("").exists():
            with suppress(OSError):
                os.rename(stale, stale.with_suffix(""))


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _prune(folder: Path, last: int, keep: int, spared: tuple[int | None, ...], every: int) -> None:
    """Later steps than the last are damaged, or training would have gone on from them: they do not count as kept."""
    earlier = [step for step in steps(folder) if step <= last]
    lasting = [step for step in earlier if step == last or not every or step % every == 0]
    for step in earlier:
        if step not in lasting[-keep:] and step not in spared:  # keep=0: all that last
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
    for unfinished in [*folder.glob("step-*.tmp"), *folder.glob("step-*.stale")]:
        shutil.rmtree(unfinished, ignore_errors=True)


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
        if FACTS not in files:
            return f"{place / MANIFEST} does not name {FACTS}"
        if manifest["step"] != step_of(place):
            return f"{place / MANIFEST} is of step {manifest['step']}"
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
    _bring_back(folder)
    names = [f"step-{step}" for step in reversed(steps(folder))]
    passed_over = _astray(folder / LATEST, names)
    for name in names:  # one that was finished but is not yet `latest` is as good: training reached it
        problem = problem_with(folder / name)
        if problem is None:
            return folder / name, passed_over
        passed_over.append(problem)
    return None, passed_over


def _astray(latest: Path, names: list[str]) -> list[str]:
    """What is wrong with `latest`: it is read for this alone, because a lost checkpoint shows nowhere else."""
    try:
        name = latest.read_text(encoding="utf-8").strip()
    except FileNotFoundError:  # a first save that ended before it was named
        return []
    except (OSError, ValueError):
        return [f"{latest} cannot be read"]
    return [] if name in names else [f"{latest} names {name[:80]!r}, which is not there"]


def load(place: Path) -> State:
    """Read a checkpoint that `problem_with` has nothing against; what its manifest does not name is left alone."""
    files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["files"]
    try:
        tensors = {Path(name).stem: load_file(place / name) for name in files if name.endswith(".safetensors")}
    except SafetensorError as problem:
        raise FileError(f"{place} cannot be read: {problem}") from None
    return State(step=step_of(place), tensors=tensors, facts=facts(place))


def facts(place: Path) -> dict[str, Any]:
    """The facts of a checkpoint, without its tensors."""
    return json.loads((place / FACTS).read_text(encoding="utf-8"))


def step_of(place: Path) -> int:
    return int(place.name.removeprefix("step-"))
