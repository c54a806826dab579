"""Write token ids to a folder of tokens (`shards.py`), a shard at a time, so that an interrupted writer can go on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from monoblock.config.schema import check_at_least, check_types, to_dict
from monoblock.data.batching.manifest import HASH_BLOCK, MANIFEST_FILE, ShardFile, ShardManifest, SplitFiles
from monoblock.data.batching.shards import OFFSET_DTYPE, check_ids, token_dtype
from monoblock.errors import FileError, InputError
from monoblock.untrusted_files import open_to_write

DEFAULT_SHARD_TOKENS = 2**27


@dataclass(frozen=True, kw_only=True)
class WriterState:
    """How far a split is written: its complete shards, and what was synced of the files that are still open."""

    shards: tuple[ShardFile, ...] = ()
    open_tokens: int = 0  # in the shard after the complete ones
    offsets: int = 0  # integers in the file of document offsets
    bytes: int = 0  # of the texts
    unknown: int = 0  # tokens that are the unknown token

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "open_tokens", "offsets", "bytes", "unknown")


class SplitWriter:
    """Append token ids to the files of a split; every shard but the last has `shard_tokens` tokens.

    state: the result of `sync` in an interrupted run, to go on after what it had written.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: WriterState | None = None
    ) -> None:
        state = WriterState() if state is None else state
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards, self.num_bytes, self.unknown = list(state.shards), state.bytes, state.unknown
        self.tokens = sum(shard.count for shard in self.shards) + state.open_tokens
        self.num_offsets = state.offsets
        self._remove_other_files()
        for shard in self.shards:
            if _file_size(folder / shard.file) != shard.count * dtype.itemsize:
                raise FileError(f"{folder / shard.file} is missing or has another size; delete {folder} and begin anew")
        self._digest = hashlib.sha256()
        self._shard = _open_at(self._shard_path, state.open_tokens * dtype.itemsize, self._digest)
        self._offsets = _open_at(self.offsets_path, state.offsets * OFFSET_DTYPE.itemsize)
        if not state.offsets:
            self._append_offsets(np.zeros(1, OFFSET_DTYPE))

    @property
    def offsets_path(self) -> Path:
        return self.folder / f"{self.split}-documents.bin"

    @property
    def _shard_path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    @property
    def _open_tokens(self) -> int:
        return self.tokens - sum(shard.count for shard in self.shards)

    def append(self, ids: bytes, ends: NDArray[Any], num_bytes: int = 0, unknown: int = 0) -> None:
        """Append ids, given as the bytes of an array of `dtype`.

        ends: how many of these ids precede the end of each document that ends among them, in ascending order.
        num_bytes, unknown: the number of bytes of the text that the ids encode, and of unknown tokens among them.
        """
        self._append_offsets((self.tokens + ends.astype(OFFSET_DTYPE)).astype(OFFSET_DTYPE))
        self.num_bytes += num_bytes
        self.unknown += unknown
        rest = memoryview(ids)
        room = (self.shard_tokens - self._open_tokens) * self.dtype.itemsize
        while len(rest):
            part = rest[:room]
            self._shard.write(part)
            self._digest.update(part)
            self.tokens += len(part) // self.dtype.itemsize
            rest, room = rest[len(part) :], room - len(part)
            if not room:
                self._close_shard()
                self._digest = hashlib.sha256()
                self._shard = _open_at(self._shard_path, 0)
                room = self.shard_tokens * self.dtype.itemsize

    def sync(self) -> WriterState:
        """Write everything to the disk, and return the state from which another writer can go on."""
        for file in (self._shard, self._offsets):
            _sync(file)
        return WriterState(
            shards=tuple(self.shards),
            open_tokens=self._open_tokens,
            offsets=self.num_offsets,
            bytes=self.num_bytes,
            unknown=self.unknown,
        )

    def finish(self) -> SplitFiles | None:
        """Complete the files; return their entry in the manifest, or None if there are no tokens."""
        if self._open_tokens:
            self._close_shard()
        _sync(self._offsets)
        if not self.shards:
            return None
        with open(self.offsets_path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        documents = ShardFile(file=self.offsets_path.name, count=self.num_offsets, sha256=digest)
        shards = tuple(self.shards)
        return SplitFiles(shards=shards, documents=documents, bytes=self.num_bytes, unknown=self.unknown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard.close()
        self._offsets.close()

    def _append_offsets(self, offsets: NDArray[Any]) -> None:
        self._offsets.write(offsets.tobytes())
        self.num_offsets += len(offsets)

    def _close_shard(self) -> None:
        _sync(self._shard)
        self._shard.close()
        name = self._shard_path.name
        self.shards.append(ShardFile(file=name, count=self._open_tokens, sha256=self._digest.hexdigest()))

    def _remove_other_files(self) -> None:
        """Remove the shards that were written after the state was stored."""
        kept = {shard.file for shard in self.shards} | {self._shard_path.name, self.offsets_path.name}
        for path in self.folder.glob(f"{self.split}-*.bin"):
            if path.name not in kept:
                path.unlink()


def _open_at(path: Path, size: int, digest: Any = None) -> BinaryIO:
    """Open a file to append after its first `size` bytes; what follows them is removed. `digest` gets these bytes."""
    if size and (_file_size(path) or 0) < size:
        raise FileError(f"{path} has lost data; delete {path.parent} and begin anew")
    file = open_to_write(path, "update" if size else "new")
    file.truncate(size)
    if digest is not None and size:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    file.seek(size)
    return file


def _file_size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names of the files in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file under a temporary name, sync it and rename it: it is never incomplete."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open_to_write(temporary) as file:
        file.write((json.dumps(to_dict(value), indent=2, ensure_ascii=False) + "\n").encode())
        _sync(file)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_manifest(
    folder: Path, vocab: int, fingerprint: str | None, splits: dict[str, SplitFiles | None], settings: Any = None
) -> ShardManifest:
    """Write manifest.json, with which a folder of tokens is complete."""
    train = splits["train"]
    if train is None:
        raise InputError("there are no tokens to write; give at least one document that is not empty")
    manifest = ShardManifest(
        format="monoblock-tokens",
        dtype="uint16" if token_dtype(vocab).itemsize == 2 else "uint32",
        vocab=vocab,
        fingerprint=fingerprint,
        train=train,
        valid=splits.get("valid"),
        settings=settings,
    )
    write_json(folder / MANIFEST_FILE, manifest)
    remove_unlisted_files(folder, manifest)
    return manifest


def remove_unlisted_files(folder: Path, manifest: ShardManifest) -> None:
    """Remove empty files of tokens, which a complete folder does not need."""
    listed = {file.file for split in manifest.splits.values() for file in (*split.shards, split.documents)}
    for path in folder.glob("*-*.bin"):
        if path.name not in listed and path.stem.startswith(("train-", "valid-")):
            path.unlink()


def write_shards(
    folder: str | Path,
    documents: Iterable[Sequence[int]],
    vocab: int,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    *,
    fingerprint: str | None = None,
) -> ShardManifest:
    """Write documents, which are sequences of token ids from 0 to vocab − 1, to a new folder of tokens.

    Each shard is a file of `shard_tokens` tokens (the last may have fewer). The folder is written under a temporary
    name and renamed when it is complete.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileError(f"{folder} already exists; give another folder, or delete it")
    if shard_tokens < 1 or vocab < 1:
        raise InputError(f"shard_tokens={shard_tokens} or vocab={vocab} is too small; write 1 or more")
    temporary, dtype = folder.with_name(f".{folder.name}.{os.getpid()}.tmp"), token_dtype(vocab)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            with SplitWriter(temporary, "train", dtype, shard_tokens) as writer:
                for number, document in enumerate(documents):
                    ids = check_ids(document, vocab, number)
                    writer.append(ids.astype(dtype).tobytes(), np.array([len(ids)]))
                manifest = write_manifest(temporary, vocab, fingerprint, {"train": writer.finish()})
            sync_folder(temporary)
            temporary.rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as problem:
        raise FileError(f"tokens cannot be written to {folder}: {problem.strerror or problem}") from None
    return manifest
