"""Compute the fingerprint of a corpus: the SHA-256 of its rows in their order.

A resumed run must continue with the data that it began with, but the path, time and size of a file do not prove that
its content is the same. Hashing the rows costs far less than tokenizing them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from monoblock.data.batching.manifest import SplitFiles
from monoblock.data.batching.shards import TokenDataset
from monoblock.data.readers.records import LabelledImage, LabelledPicture, TaggedSentence
from monoblock.untrusted_files import open_regular


def fingerprint_rows(rows: Iterable[Any]) -> str:
    """Return the SHA-256 of rows, which are strings or records (`readers.records`); it changes if any row changes."""
    digest = hashlib.sha256()
    for row in rows:
        for raw in _row_bytes(row):
            digest.update(b"%d:" % len(raw))  # so that moving text to the next row changes the hash
            digest.update(raw)
    return digest.hexdigest()


def _row_bytes(row: Any) -> Iterable[bytes | memoryview]:
    match row:
        case str():
            yield row.encode("utf-8", "surrogatepass")
        case LabelledImage(pixels, label):
            yield f"{pixels.dtype.str}{pixels.shape}{label}".encode()
            yield np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data
        case LabelledPicture(path, label):  # wherever it lies
            yield label.encode()
            with open_regular(path) as file:
                yield file.read()
        case TaggedSentence(words, labels):  # the document is not part of the content
            yield json.dumps((words, labels)).encode()
        case TokenDataset(files=SplitFiles() as files):  # their SHA-256 are known
            yield json.dumps([file.sha256 for file in (*files.shards, files.documents)]).encode()
        case _:
            yield json.dumps(row).encode()
