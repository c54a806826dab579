"""The progress of an interrupted preparation: what was asked for, and how far its files are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monoblock.config.schema import check_at_least, check_types, from_dict
from monoblock.data.batching.manifest import MAX_MANIFEST_BYTES, PROGRESS_FILE, PreparationSettings, SourceFile
from monoblock.data.batching.shard_writer import WriterState
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import read_json

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

NOTHING_WRITTEN = WriterState()
SETTING_NAMES = {
    "tokenizer": "another tokenizer",
    "documents": "another --documents",
    "validation": "another --validation",
    "shard_tokens": "another --shard-tokens",
    "part_bytes": "parts of another size",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The content of progress.json, which is replaced after the files of the splits have been synced."""

    format: Literal["monoblock-tokens-progress"] = "monoblock-tokens-progress"
    next_part: int = 0  # the first part that is not written yet
    bytes: int = 0  # of text before this part
    stream_checksum: int = 0  # CRC-32 of the text before this part that cannot be read twice
    train: WriterState = NOTHING_WRITTEN
    valid: WriterState = NOTHING_WRITTEN

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "next_part", "bytes")


def read_progress(folder: Path) -> Progress:
    path = folder / PROGRESS_FILE
    try:
        return from_dict(Progress, read_json(path, max_bytes=MAX_MANIFEST_BYTES), PROGRESS_FILE)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}; delete {folder} and begin anew") from None


def read_settings(path: Path) -> PreparationSettings:
    try:
        return from_dict(PreparationSettings, read_json(path, max_bytes=MAX_MANIFEST_BYTES), path.name)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}; delete {path.parent} and begin anew") from None


def check_same_settings(folder: Path, saved: PreparationSettings | None, current: PreparationSettings) -> None:
    """Raise ConfigError, naming the first difference, unless a folder was begun with the current settings."""
    advice = "give the same arguments, or another folder with --out"
    if saved is None:
        raise ConfigError(f"{folder} was not written by `monoblock data prepare`; give another folder with --out")
    for name, what in SETTING_NAMES.items():
        before, now = getattr(saved, name), getattr(current, name)
        if before != now:
            raise ConfigError(f"{folder} was begun with {what} ({before}, and now {now}); {advice}")
    if saved.sources != current.sources:
        raise ConfigError(f"{folder} was begun with other texts: {_describe_source(saved, current)}; {advice}")


def _describe_source(saved: PreparationSettings, current: PreparationSettings) -> str:
    before: dict[str, SourceFile] = {source.name: source for source in saved.sources}
    now = {source.name: source for source in current.sources}
    for name in {**before, **now}:
        if name not in now:
            return f"{name} is missing now"
        if name not in before:
            return f"{name} is new"
        if before[name] != now[name]:
            return f"{name} was changed since then"
    return "their order differs"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from preparing the same folder at the same time."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(f"{folder} is being written by another process; wait until it ends") from None
        yield
    finally:
        os.close(handle)
