"""Images and labels in IDX files, as MNIST (LeCun et al. 1998) and its relatives come, plain or compressed by gzip.

A file is a magic number 00 00 08 n (bytes, n axes), the n sizes as big-endian 32-bit numbers, then the bytes.  A header
may claim anything: what it asks for is held against the file before memory is taken, and never more is unpacked.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from monoblock.data.readers import Image
from monoblock.errors import FileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGES, LABELS = "images", "labels"
ENDINGS = tuple(f"-images{dash}idx3-ubyte{gz}" for dash in "-." for gz in ("", ".gz"))
BYTES = 8  # the type of element, as IDX numbers them
DENSEST = 1032  # deflate packs no more bytes than these into one
LARGEST = 2**32


def is_idx(path: Path) -> bool:
    """Whether a name is that of a file of images: train-images-idx3-ubyte.gz."""
    return path.name.endswith(ENDINGS)


def labels_of(path: Path) -> Path:
    """The file of labels that belongs to a file of images."""
    stem, _, ending = path.name.rpartition(IMAGES)
    return path.with_name(f"{stem}{LABELS}{ending.replace('idx3', 'idx1')}")


def read_idx(path: str | Path) -> Iterator[Image]:
    """The images of a file, with the labels of the file beside it."""
    import numpy as np

    path = Path(path)
    images, labels = read_array(path, axes=3), read_array(labels_of(path), axes=1)
    if len(images) != len(labels):
        raise FileError(f"{path} holds {len(images)} images and {labels_of(path).name} {len(labels)} labels")
    pixels = images[:, None].astype(np.float32) / np.float32(255)  # (count, 1, height, width)
    for one, label in zip(pixels, labels.tolist(), strict=True):
        yield Image(one, label)


def read_array(path: Path, axes: int) -> NDArray[np.uint8]:
    """The bytes of an IDX file in the shape it states."""
    import numpy as np

    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            shape = _shape(file, path, axes)
            size = math.prod(shape)
            room = path.stat().st_size * (DENSEST if path.suffix == ".gz" else 1)
            if size > min(room, LARGEST):
                raise FileError(f"{path} states {'×'.join(map(str, shape))} bytes and is too short for them")
            raw = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise FileError(f"{path} is no whole .gz file: {problem!s:.60}") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if len(raw) != size:
        more = "more" if len(raw) > size else "fewer"
        raise FileError(f"{path} holds {more} bytes than the {'×'.join(map(str, shape))} it states")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _shape(file: IO[bytes] | gzip.GzipFile, path: Path, axes: int) -> tuple[int, ...]:
    head = file.read(4 + 4 * axes)
    if len(head) < 4 + 4 * axes or head[:4] != bytes((0, 0, BYTES, axes)):
        raise FileError(f"{path} is no IDX file of bytes with {axes} ax{'i' if axes == 1 else 'e'}s: its head is wrong")
    shape = tuple(int.from_bytes(head[at : at + 4], "big") for at in range(4, 4 + 4 * axes, 4))
    if not all(shape):
        raise FileError(f"{path} states {'×'.join(map(str, shape))}; give one or more, none empty")
    return shape
