"""Store token ids on disk as plain arrays, in files that are memory-mapped and never unpickled. A folder holds:

    tokens-00000.bin …   the ids of all documents, concatenated and cut into files of equal size
    documents.bin        the offset where each document begins, and where the last one ends (uint64)
    manifest.json        vocabulary, dtype, sizes and SHA-256 of the files; written last

A folder is written under a temporary name and renamed when it is complete, so that no incomplete folder is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from monoblock.config.schema import check_at_least, check_types, from_dict, to_dict
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.untrusted_files import read_json

MANIFEST_FILE, DOCUMENTS_FILE = "manifest.json", "documents.bin"
MAX_MANIFEST_BYTES = 16 * 2**20
OFFSET_DTYPE = np.dtype("<u8")


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """An entry of the manifest for one file: its name, the number of integers in it and its SHA-256."""

    file: str
    count: int
    sha256: str

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "count")
        if Path(self.file).name != self.file or self.file in ("", ".", ".."):
            raise ConfigError(f"ShardFile.file={self.file!r} lies outside the folder; write a plain file name")


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """The content of manifest.json; `fingerprint` identifies the tokenizer that made the ids."""

    format: Literal["monoblock-tokens"]
    dtype: Literal["uint16", "uint32"]
    vocab: int
    fingerprint: str | None = None
    shards: tuple[ShardFile, ...]
    documents: ShardFile

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "vocab")


def write_shards(
    folder: str | Path,
    documents: Iterable[Sequence[int]],
    vocab: int,
    shard_tokens: int = 2**27,
    *,
    fingerprint: str | None = None,
) -> ShardManifest:
    """Write documents, which are sequences of token ids from 0 to vocab − 1, to a new folder of shards.

    Each shard is a file of `shard_tokens` tokens (the last may have fewer). Only one shard is in memory at a time.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileError(f"{folder} already exists; give another folder, or delete it")
    if shard_tokens < 1 or vocab < 1:
        raise InputError(f"shard_tokens={shard_tokens} or vocab={vocab} is too small; write 1 or more")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            manifest = _write_files(temporary, documents, vocab, shard_tokens, fingerprint)
            _sync_folder(temporary)
            temporary.rename(folder)
            _sync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as problem:
        raise FileError(f"tokens cannot be written to {folder}: {problem.strerror or problem}") from None
    return manifest


def _write_files(
    folder: Path, documents: Iterable[Sequence[int]], vocab: int, shard_tokens: int, fingerprint: str | None
) -> ShardManifest:
    dtype = _token_dtype(vocab)
    offsets = array("Q", [0])
    shards: list[ShardFile] = []
    shard, filled = np.empty(shard_tokens, dtype), 0  # memory pages that are never written to cost nothing
    for number, document in enumerate(documents):
        ids = _check_ids(document, vocab, number)
        offsets.append(offsets[-1] + len(ids))
        while len(ids):
            part = ids[: shard_tokens - filled]
            shard[filled : filled + len(part)] = part
            ids, filled = ids[len(part) :], filled + len(part)
            if filled == shard_tokens:
                shards.append(_write_array(folder, f"tokens-{len(shards):05d}.bin", shard))
                filled = 0
    if filled:
        shards.append(_write_array(folder, f"tokens-{len(shards):05d}.bin", shard[:filled]))
    if not shards:
        raise InputError("there are no tokens to write; give at least one document that is not empty")
    documents_file = _write_array(folder, DOCUMENTS_FILE, np.frombuffer(offsets, dtype=np.uint64).astype(OFFSET_DTYPE))
    manifest = ShardManifest(
        format="monoblock-tokens",
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocab=vocab,
        fingerprint=fingerprint,
        shards=tuple(shards),
        documents=documents_file,
    )
    _write_synced(folder / MANIFEST_FILE, (json.dumps(to_dict(manifest), indent=2) + "\n").encode())
    return manifest


def _token_dtype(vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab <= 2**16 else np.dtype("<u4")


def _check_ids(document: Sequence[int], vocab: int, number: int) -> NDArray[np.int64]:
    ids = np.asarray(document, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab):
        raise InputError(
            f"document {number} is not a list of ids from 0 to {vocab - 1}; is vocab={vocab} the size of the tokenizer?"
        )
    return ids


def _write_array(folder: Path, name: str, values: NDArray[Any]) -> ShardFile:
    raw = values.view(np.uint8).data
    _write_synced(folder / name, raw)
    return ShardFile(file=name, count=len(values), sha256=hashlib.sha256(raw).hexdigest())


def _write_synced(path: Path, raw: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class TokenDataset:
    """The token ids of all documents, concatenated, and the offset where each document begins.

    The ids come from a folder of shards, or with `from_documents` from memory.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        """Open a folder of shards read-only.

        The sizes of its files are always checked; `verify` also reads every file and checks its SHA-256.
        """
        self.folder: Path | None = Path(folder)
        manifest = read_manifest(self.folder)
        shards = [_map_file(self.folder, shard, np.dtype(manifest.dtype), verify) for shard in manifest.shards]
        offsets = _map_file(self.folder, manifest.documents, OFFSET_DTYPE, verify)
        self._set_arrays(shards, offsets, manifest.vocab, manifest.fingerprint)

    @classmethod
    def from_documents(
        cls, documents: Iterable[Sequence[int]], vocab: int, *, fingerprint: str | None = None
    ) -> TokenDataset:
        """Build a dataset from documents in memory, which are sequences of token ids from 0 to vocab − 1."""
        rows = [_check_ids(document, vocab, number) for number, document in enumerate(documents)]
        ids = np.concatenate([np.empty(0, np.int64), *rows]).astype(_token_dtype(vocab))
        tokens = cls.__new__(cls)
        tokens.folder = None
        tokens._set_arrays([ids], np.cumsum([0, *map(len, rows)]).astype(OFFSET_DTYPE), vocab, fingerprint)
        return tokens

    def _set_arrays(
        self, shards: list[NDArray[Any]], offsets: NDArray[Any], vocab: int, fingerprint: str | None
    ) -> None:
        self.vocab, self.fingerprint = vocab, fingerprint
        self._shards = shards
        self._shard_starts = np.cumsum([0, *map(len, shards)])  # the offset of each shard, and the end of the last
        self.document_offsets = offsets  # the offset of each document, and the end of the last
        complete = len(offsets) and offsets[0] == 0 and offsets[-1] == self._shard_starts[-1]
        if not complete or bool(np.any(offsets[1:] < offsets[:-1])):
            raise FileError(
                f"{self.folder}: {DOCUMENTS_FILE} does not fit the tokens, because its offsets do not ascend from 0 to "
                f"{len(self)}; write the folder again"
            )
        if not len(self):
            raise InputError("there are no tokens; give at least one document that is not empty")

    def __len__(self) -> int:
        return int(self._shard_starts[-1])

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return ids[start:stop] of the concatenated documents as one array, even if it spans several shards."""
        if not 0 <= start <= stop <= len(self):
            raise InputError(f"tokens {start} to {stop} are out of range; there are {len(self)} tokens")
        ids = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        position = start
        while position < stop:
            first, end = int(self._shard_starts[shard]), min(stop, int(self._shard_starts[shard + 1]))
            ids[position - start : end - start] = self._shards[shard][position - first : end - first]
            position, shard = end, shard + 1
        if len(ids) and ids.max() >= self.vocab:
            raise FileError(
                f"{self.folder} holds the id {ids.max()}, beyond its vocabulary of {self.vocab}; write the folder again"
            )
        return ids

    def document(self, number: int) -> NDArray[np.int64]:
        """Return the ids of document `number`, counted from 0."""
        return self.read(int(self.document_offsets[number]), int(self.document_offsets[number + 1]))

    # Pickling a memory map would copy its whole content, so only the folder is pickled, and opened again.
    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder} if self.folder is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["folder"] is None:
            self.__dict__.update(state)
        else:
            self.__init__(state["folder"])  # type: ignore[misc]


def read_manifest(folder: str | Path) -> ShardManifest:
    """Read the manifest of a folder of shards."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        raise FileError(f"{folder} is not a folder of tokens, because it has no {MANIFEST_FILE}")
    data = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    try:
        return from_dict(ShardManifest, data, MANIFEST_FILE)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}") from None


def _map_file(folder: Path, shard: ShardFile, dtype: np.dtype[Any], verify: bool) -> NDArray[Any]:
    path = folder / shard.file
    dtype = dtype.newbyteorder("<")
    if not path.is_file() or path.is_symlink():
        raise FileError(f"{path} is missing or a symbolic link; write the folder again")
    if path.stat().st_size != shard.count * dtype.itemsize:
        expected = f"{shard.count * dtype.itemsize:,}"
        raise FileError(
            f"{path} has {path.stat().st_size:,} bytes where the manifest states {expected}; write the folder again"
        )
    if verify:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise FileError(
                    f"{path} is damaged: its SHA-256 differs from the one in the manifest; write the folder again"
                )
    if not shard.count:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")
