"""Folders of tokens: token ids on disk as plain arrays, memory-mapped and never unpickled, and their manifest.

A folder holds, for each split (train, and valid if there is one):

    train-00000.bin …    the ids of all documents, concatenated and cut into files of equal size
    train-documents.bin  the offset where each document begins, and where the last one ends (uint64)

and manifest.json, which is written last: a folder without it is not complete and is never read. The integers are
little-endian without a header, so that a file is mapped as it is, can be extended, and is read by any other program.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from monoblock.config.schema import check_at_least, check_types, from_dict, to_dict
from monoblock.errors import ConfigError, FileError, InputError, SplitError
from monoblock.untrusted_files import open_regular, open_to_write, read_json, write_atomically

MANIFEST_FILE, PROGRESS_FILE = "manifest.json", "progress.json"
MAX_MANIFEST_BYTES = 64 * 2**20
FORMAT_BYTES = 100  # at the beginning of a manifest, which name its format
HASH_BLOCK = 2**22  # bytes that are hashed at a time


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
class SplitFiles:
    """The entry of the manifest for a split: its files, the bytes of its texts, and how many tokens are unknown."""

    shards: tuple[ShardFile, ...]
    documents: ShardFile
    bytes: int
    unknown: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "bytes", "unknown")

    @property
    def tokens(self) -> int:
        return sum(shard.count for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return self.documents.count - 1


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that was read: its name, size in bytes and time of modification in nanoseconds; None if unknown."""

    name: str
    bytes: int | None = None
    modified: int | None = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class PreparationSettings:
    """Everything that decides the content of a folder that `monoblock data prepare` writes."""

    tokenizer: str  # the fingerprint of a given tokenizer, or how it is trained
    documents: str  # what a document of a plain text file is
    validation: float  # the share of documents that is held out
    shard_tokens: int
    part_bytes: int  # the input is read in parts of this size
    sources: tuple[SourceFile, ...]

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """The content of manifest.json; `fingerprint` identifies the tokenizer that made the ids."""

    format: Literal["monoblock-tokens"]
    dtype: Literal["uint16", "uint32"]
    vocab: int
    fingerprint: str | None = None
    train: SplitFiles
    valid: SplitFiles | None = None
    settings: PreparationSettings | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "vocab")

    @property
    def splits(self) -> dict[str, SplitFiles]:
        return {"train": self.train} | ({} if self.valid is None else {"valid": self.valid})


def is_token_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of tokens, also one that is not complete yet."""
    for file in (Path(path) / MANIFEST_FILE, Path(path) / PROGRESS_FILE):
        if file.is_file():
            with open_regular(file) as handle:
                if b'"format": "monoblock-tokens' in handle.read(FORMAT_BYTES):
                    return True
    return False


def read_manifest(folder: str | Path) -> ShardManifest:
    """Read the manifest of a folder of tokens."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        if (Path(folder) / PROGRESS_FILE).is_file():
            raise FileError(f"{folder} is not complete; run the same `monoblock data prepare` again, and it goes on")
        raise FileError(f"{folder} is not a folder of tokens, because it has no {MANIFEST_FILE}")
    data = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    try:
        return from_dict(ShardManifest, data, MANIFEST_FILE)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}") from None


def verify_files(folder: Path, files: SplitFiles, progress: Callable[[int], object] = lambda count: None) -> None:
    """Raise FileError if the SHA-256 of a file differs from that in the manifest.

    progress: called with the number of bytes just read.
    """
    for file in (*files.shards, files.documents):
        path, digest = folder / file.file, hashlib.sha256()
        try:
            with open_regular(path) as handle:
                while block := handle.read(HASH_BLOCK):
                    digest.update(block)
                    progress(len(block))
        except OSError as problem:
            raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
        if digest.hexdigest() != file.sha256:
            raise FileError(
                f"{path} is damaged: its SHA-256 differs from the one in the manifest; write the folder again"
            )


OFFSET_DTYPE = np.dtype("<u8")
CHECK_BLOCK = 2**20  # offsets that are compared at a time


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Return the smallest of the two dtypes that holds all ids of a vocabulary."""
    return np.dtype("<u2") if vocab <= 2**16 else np.dtype("<u4")


def check_ids(document: Sequence[int], vocab: int, number: int) -> NDArray[np.int64]:
    """Return the ids of document `number` as an array; raise InputError if one is not in the vocabulary."""
    ids = np.asarray(document, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab):
        raise InputError(
            f"document {number} is not a list of ids from 0 to {vocab - 1}; is vocab={vocab} the size of the tokenizer?"
        )
    return ids


class TokenDataset:
    """The token ids of all documents, concatenated, and the offset where each document begins.

    The ids come from a folder of shards, or with `from_documents` from memory.
    """

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        """Open one split of a folder of tokens read-only; the sizes of its files are checked."""
        self.folder: Path | None = Path(folder)
        self.split = split
        manifest = read_manifest(self.folder)
        if split not in manifest.splits:
            raise SplitError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits)}")
        self.files: SplitFiles | None = manifest.splits[split]
        shards = [_map_file(self.folder, shard, np.dtype(manifest.dtype)) for shard in self.files.shards]
        offsets = _map_file(self.folder, self.files.documents, OFFSET_DTYPE)
        self._set_arrays(shards, offsets, manifest.vocab, manifest.fingerprint)

    @classmethod
    def from_documents(
        cls, documents: Iterable[Sequence[int]], vocab: int, *, fingerprint: str | None = None
    ) -> TokenDataset:
        """Build a dataset from documents in memory, which are sequences of token ids from 0 to vocab − 1."""
        rows = [check_ids(document, vocab, number) for number, document in enumerate(documents)]
        ids = np.concatenate([np.empty(0, np.int64), *rows]).astype(token_dtype(vocab))
        tokens = cls.__new__(cls)
        tokens.folder, tokens.split, tokens.files = None, "train", None
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
        if not complete or not _is_ascending(offsets):
            raise FileError(
                f"{self.folder}: {self.split}-documents.bin does not fit the tokens, because its offsets do not ascend "
                f"from 0 to {len(self)}; write the folder again"
            )
        if not len(self):
            raise InputError("there are no tokens; give at least one document that is not empty")

    def __len__(self) -> int:
        return int(self._shard_starts[-1])

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

    # Pickling a memory map would copy its whole content, so only the folder is pickled, and opened again.
    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "split": self.split} if self.folder is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["folder"] is None:
            self.__dict__.update(state)
        else:
            self.__init__(state["folder"], state["split"])  # type: ignore[misc]


def _is_ascending(offsets: NDArray[Any]) -> bool:
    """Return whether no offset is below the one before it; a block at a time, because the file may be large."""
    blocks = (offsets[start : start + CHECK_BLOCK + 1] for start in range(0, len(offsets), CHECK_BLOCK))
    return not any(bool(np.any(block[1:] < block[:-1])) for block in blocks)


def _map_file(folder: Path, file: ShardFile, dtype: np.dtype[Any]) -> NDArray[Any]:
    path = folder / file.file
    dtype = dtype.newbyteorder("<")
    if not path.is_file() or path.is_symlink():
        raise FileError(f"{path} is missing or a symbolic link; write the folder again")
    if path.stat().st_size != file.count * dtype.itemsize:
        expected = f"{file.count * dtype.itemsize:,}"
        raise FileError(
            f"{path} has {path.stat().st_size:,} bytes where the manifest states {expected}; write the folder again"
        )
    if not file.count:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


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


@dataclass
class SplitTokens:
    """Token ids to append to a split, as the bytes of an array.

    ends: how many of these ids precede the end of each document that ends among them, in ascending order.
    num_bytes, unknown: the number of bytes of the text that the ids encode, and of unknown tokens among them.
    """

    ids: bytearray
    ends: list[int]
    num_bytes: int = 0
    unknown: int = 0


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
        kept = {shard.file for shard in self.shards} | {self._shard_path.name, self.offsets_path.name}
        for path in folder.glob(f"{split}-*.bin"):
            if path.name not in kept:  # written after the state was stored
                path.unlink()
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

    def append(self, tokens: SplitTokens) -> None:
        self._append_offsets((self.tokens + np.array(tokens.ends, OFFSET_DTYPE)).astype(OFFSET_DTYPE))
        self.num_bytes += tokens.num_bytes
        self.unknown += tokens.unknown
        rest = memoryview(tokens.ids)
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


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, and sync the folder."""
    write_atomically(path, json.dumps(to_dict(value), indent=2, ensure_ascii=False) + "\n")
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
