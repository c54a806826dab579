"""Token ids on disk: plain numbers in files that are mapped into memory, never unpickled.

    tokens-00000.bin …   the ids of all documents, one after the other, cut into files of equal size
    documents.bin        where each document begins, and where the last one ends (uint64)
    manifest.json        how to read them, their sizes and SHA-256; written last

A folder appears whole, by one rename, or not at all.
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

from monoblock.errors import ConfigError, FileError, InputError
from monoblock.schema import check, check_at_least, from_dict, to_dict

MANIFEST, DOCUMENTS = "manifest.json", "documents.bin"
LARGEST_MANIFEST = 16 * 2**20
OFFSET = np.dtype("<u8")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of the folder."""

    file: str
    count: int
    sha256: str

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 0, "count")
        if Path(self.file).name != self.file or self.file in ("", ".", ".."):
            raise ConfigError(f"Part.file={self.file!r} lies outside the folder; write a plain file name")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json.  `fingerprint` is that of the tokenizer the ids came from."""

    format: Literal["monoblock-tokens"]
    dtype: Literal["uint16", "uint32"]
    vocab: int
    fingerprint: str | None = None
    shards: tuple[Part, ...]
    documents: Part

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "vocab")


def write_shards(
    folder: str | Path,
    documents: Iterable[Sequence[int]],
    vocab: int,
    shard_tokens: int = 2**27,
    *,
    fingerprint: str | None = None,
) -> Manifest:
    """Write the documents in passing, a shard in memory at a time; the folder must not exist yet."""
    folder = Path(folder)
    if folder.exists():
        raise FileError(f"{folder} is there already; give another folder, or delete it")
    if shard_tokens < 1 or vocab < 1:
        raise InputError(f"shard_tokens={shard_tokens} and vocab={vocab} cannot be; write 1 or more")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            manifest = _write(beside, documents, vocab, shard_tokens, fingerprint)
            _sync(beside)
            beside.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as problem:
        raise FileError(f"tokens cannot be written to {folder}: {problem.strerror or problem}") from None
    return manifest


def _write(
    folder: Path, documents: Iterable[Sequence[int]], vocab: int, shard_tokens: int, fingerprint: str | None
) -> Manifest:
    dtype = _dtype(vocab)
    offsets = array("Q", [0])
    parts: list[Part] = []
    shard, filled = np.empty(shard_tokens, dtype), 0  # of which only what is filled takes up memory
    for number, document in enumerate(documents):
        ids = _checked(document, vocab, number)
        offsets.append(offsets[-1] + len(ids))
        while len(ids):
            piece = ids[: shard_tokens - filled]
            shard[filled : filled + len(piece)] = piece
            ids, filled = ids[len(piece) :], filled + len(piece)
            if filled == shard_tokens:
                parts.append(_put(folder, f"tokens-{len(parts):05d}.bin", shard))
                filled = 0
    if filled:
        parts.append(_put(folder, f"tokens-{len(parts):05d}.bin", shard[:filled]))
    if not parts:
        raise InputError("there is not one token to write; give at least one document that is not empty")
    ends = _put(folder, DOCUMENTS, np.frombuffer(offsets, dtype=np.uint64).astype(OFFSET))
    manifest = Manifest(
        format="monoblock-tokens",
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        vocab=vocab,
        fingerprint=fingerprint,
        shards=tuple(parts),
        documents=ends,
    )
    _settle(folder / MANIFEST, (json.dumps(to_dict(manifest), indent=2) + "\n").encode())
    return manifest


def _dtype(vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab <= 2**16 else np.dtype("<u4")


def _checked(document: Sequence[int], vocab: int, number: int) -> NDArray[np.int64]:
    ids = np.asarray(document, dtype=np.int64)
    if ids.ndim != 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab):
        raise InputError(f"document {number} is no row of ids from 0 to {vocab - 1}; does the tokenizer fit the model?")
    return ids


def _put(folder: Path, name: str, numbers: NDArray[Any]) -> Part:
    raw = numbers.view(np.uint8).data
    _settle(folder / name, raw)
    return Part(file=name, count=len(numbers), sha256=hashlib.sha256(raw).hexdigest())


def _settle(path: Path, raw: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Tokens:
    """One long row of ids and the places where its documents begin, from a folder of shards or from memory."""

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        """Open a folder read-only.  Sizes are always checked; `verify` reads everything and checks the SHA-256."""
        self.folder: Path | None = Path(folder)
        manifest = read_manifest(self.folder)
        parts = [_map(self.folder, part, np.dtype(manifest.dtype), verify) for part in manifest.shards]
        self._fill(parts, _map(self.folder, manifest.documents, OFFSET, verify), manifest.vocab, manifest.fingerprint)

    @classmethod
    def from_documents(
        cls, documents: Iterable[Sequence[int]], vocab: int, *, fingerprint: str | None = None
    ) -> Tokens:
        """The same, of documents in memory."""
        rows = [_checked(document, vocab, number) for number, document in enumerate(documents)]
        ids = np.concatenate([np.empty(0, np.int64), *rows]).astype(_dtype(vocab))
        tokens = cls.__new__(cls)
        tokens.folder = None
        tokens._fill([ids], np.cumsum([0, *map(len, rows)]).astype(OFFSET), vocab, fingerprint)
        return tokens

    def _fill(self, parts: list[NDArray[Any]], offsets: NDArray[Any], vocab: int, fingerprint: str | None) -> None:
        self.vocab, self.fingerprint = vocab, fingerprint
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])  # of each shard, and the end of the last
        self.offsets = offsets  # of each document, and the end of the last
        known = len(offsets) and offsets[0] == 0 and offsets[-1] == self._starts[-1]
        if not known or bool(np.any(offsets[1:] < offsets[:-1])):
            raise FileError(f"{self.folder}: {DOCUMENTS} does not fit the tokens; write the folder anew")
        if not len(self):
            raise InputError("there is not one token; give at least one document that is not empty")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ids from `start` to before `stop`, across shards."""
        if not 0 <= start <= stop <= len(self):
            raise InputError(f"tokens {start} to {stop} are not there; there are {len(self)}")
        out = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self._starts[shard]), min(stop, int(self._starts[shard + 1]))
            out[at - start : end - start] = self._parts[shard][at - first : end - first]
            at, shard = end, shard + 1
        if len(out) and out.max() >= self.vocab:
            raise FileError(f"{self.folder} holds the id {out.max()}, beyond its vocabulary of {self.vocab}")
        return out

    def document(self, number: int) -> NDArray[np.int64]:
        """The ids of one document."""
        return self.read(int(self.offsets[number]), int(self.offsets[number + 1]))

    # A mapped file would travel to another process as a copy of all it holds; its folder is enough.
    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder} if self.folder is not None else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["folder"] is None:
            self.__dict__.update(state)
        else:
            self.__init__(state["folder"])  # type: ignore[misc]


def read_manifest(folder: str | Path) -> Manifest:
    """What a folder of shards says about itself."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileError(f"{folder} is no folder of tokens: it has no {MANIFEST}")
    if path.stat().st_size > LARGEST_MANIFEST:
        raise FileError(f"{path} is larger than any manifest; is it the right file?")
    try:
        return from_dict(Manifest, json.loads(path.read_text(encoding="utf-8")), MANIFEST)
    except (ConfigError, ValueError, RecursionError) as problem:
        raise FileError(f"{path} cannot be used: {problem}") from None


def _map(folder: Path, part: Part, dtype: np.dtype[Any], verify: bool) -> NDArray[Any]:
    path = folder / part.file
    dtype = dtype.newbyteorder("<")
    if not path.is_file() or path.is_symlink():
        raise FileError(f"{folder} lacks {part.file}, or it is a link; write the folder anew")
    if path.stat().st_size != part.count * dtype.itemsize:
        expected = f"{part.count * dtype.itemsize:,}"
        raise FileError(f"{path} has {path.stat().st_size:,} bytes where the manifest says {expected}")
    if verify:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                raise FileError(f"{path} is damaged: its SHA-256 is not the manifest's")
    if not part.count:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")
