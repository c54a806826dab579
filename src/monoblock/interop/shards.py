"""Writing weights: one file, or several of bounded size with an index; all beside their old versions first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from monoblock.interop.safely import INDEX, WEIGHTS

LARGEST = 5 * 10**9  # bytes of a file, unless a single tensor is larger
Maker = Callable[[], Tensor]  # a tensor made when it is written, so that no second copy of a model is held


def save_weights(folder: Path, makers: Sequence[Mapping[str, Maker]], sizes: Mapping[str, int], largest: int) -> None:
    """Write tensors; those of one mapping come from one another and stay in one file."""
    files: list[list[Mapping[str, Maker]]] = [[]]
    filled = 0
    for group in makers:
        size = sum(sizes[name] for name in group)
        if files[-1] and filled + size > largest:
            files.append([])
            filled = 0
        files[-1].append(group)
        filled += size
    count = len(files)
    names = [WEIGHTS] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for name, groups in zip(names, files, strict=True):
        tensors = {key: make().detach().contiguous() for group in groups for key, make in group.items()}
        save_file(tensors, folder / f"{name}.tmp", metadata={"format": "pt"})
    places = {key: name for name, groups in zip(names, files, strict=True) for group in groups for key in group}
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{INDEX}.tmp").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name in [*names, *([INDEX] if count > 1 else [])]:
        settle(folder / name)
    _remove_others(folder, {*names, *([INDEX] if count > 1 else [])})


def settle(place: Path) -> None:
    """On disk for certain, then renamed: a crash leaves the old file or the new one, never half of one."""
    written = place.with_name(f"{place.name}.tmp")
    with open(written, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(written, place)


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Weights of an earlier save in another number of files would be read in place of these."""
    for path in (folder / INDEX, folder / WEIGHTS, *folder.glob("model-?????-of-?????.safetensors")):
        if path.name not in kept:
            path.unlink(missing_ok=True)
