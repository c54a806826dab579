"""The manifest of a folder of tokens: the list of its files, with their sizes and SHA-256.

A folder holds, for each split (train, and valid if there is one):

    train-00000.bin …    the ids of all documents, concatenated and cut into files of equal size
    train-documents.bin  the offset where each document begins, and where the last one ends (uint64)

and manifest.json, which is written last: a folder without it is not complete and is never read. The integers are
little-endian without a header, so that a file is mapped as it is, can be extended, and is read by any other program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monoblock.config.schema import check_at_least, check_types, from_dict
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import open_regular, read_json

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
