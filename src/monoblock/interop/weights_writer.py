"""Write weights as safetensors: in one file, or in several shards with an index file.

Every file is written under a temporary name and then renamed, so an interrupted save never destroys an earlier one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from monoblock.interop.safetensors_reader import INDEX_FILE, WEIGHTS_FILE
from monoblock.untrusted_files import open_to_write

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
