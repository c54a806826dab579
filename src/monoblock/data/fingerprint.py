"""What a corpus holds, as one number: SHA-256 over its rows as they were read, in their order.

A run that goes on must go on with what it began with.  A path, or a package's name, says nothing about that; a file's
time and size say little.  Hashing costs far less than cutting the same rows into tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from monoblock.data.readers import Image


def fingerprint(rows: Iterable[Any]) -> str:
    """The SHA-256 of texts, of the tuples of `readers`, or of images; equal only where every row is."""
    digest = hashlib.sha256()
    for row in rows:
        for raw in _raw(row):
            digest.update(b"%d:" % len(raw))  # its length first, so that no two rows run into one another
            digest.update(raw)
    return digest.hexdigest()


def _raw(row: Any) -> Iterable[bytes | memoryview]:
    match row:
        case str():
            yield row.encode("utf-8", "surrogatepass")
        case Image(pixels, label):
            yield f"{pixels.dtype.str}{pixels.shape}{label}".encode()
            yield np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data
        case _:
            yield json.dumps(row).encode()
