"""The fingerprint of a corpus: SHA-256 over its rows in order.

A resumed run must continue with the data it began with, which neither a path nor a file's time and size can prove.
Hashing costs far less than tokenizing the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from monoblock.data.readers.records import LabelledImage


def fingerprint_rows(rows: Iterable[Any]) -> str:
    """Return the SHA-256 of rows, `str` or classes of `readers.records`; any changed row changes it."""
    digest = hashlib.sha256()
    for row in rows:
        for raw in _row_bytes(row):
            digest.update(b"%d:" % len(raw))  # the length first, so that row boundaries count
            digest.update(raw)
    return digest.hexdigest()


def _row_bytes(row: Any) -> Iterable[bytes | memoryview]:
    match row:
        case str():
            yield row.encode("utf-8", "surrogatepass")
        case LabelledImage(pixels, label):
            yield f"{pixels.dtype.str}{pixels.shape}{label}".encode()
            yield np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data
        case _:
            yield json.dumps(row).encode()
