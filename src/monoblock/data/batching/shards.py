"""Read token ids that are stored on disk as plain arrays (`manifest.py`), memory-mapped and never unpickled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.data.batching.manifest import ShardFile, SplitFiles, read_manifest, verify_files
from monoblock.errors import FileError, InputError, SplitError

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

    def __init__(self, folder: str | Path, split: str = "train", *, verify: bool = False) -> None:
        """Open one split of a folder of tokens read-only.

        The sizes of its files are always checked; `verify` also reads every file and checks its SHA-256.
        """
        self.folder: Path | None = Path(folder)
        self.split = split
        manifest = read_manifest(self.folder)
        if split not in manifest.splits:
            raise SplitError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits)}")
        self.files: SplitFiles | None = manifest.splits[split]
        if verify:
            verify_files(self.folder, self.files)
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
