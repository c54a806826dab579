"""Read images and labels from IDX files, the format of MNIST (LeCun et al. 1998), plain or compressed by gzip.

A file begins with the four bytes 00 00 08 n, where 08 is the code of unsigned bytes and n the number of axes. The sizes
of the n axes follow as big-endian 32-bit integers, then the data. The header is untrusted: memory is allocated only if
the file is as long as the header says, and of a gzip file no more than that length is decompressed.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from monoblock.data.readers.records import LabelledImage
from monoblock.errors import FileError
from monoblock.untrusted_files import check_expansion, open_regular, safe_join

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGES, LABELS = "images", "labels"
IMAGE_FILE_SUFFIXES = tuple(f"-images{dash}idx3-ubyte{gz}" for dash in "-." for gz in ("", ".gz"))
UINT8_TYPE_CODE = 8  # the code of unsigned bytes in an IDX header
MAX_DEFLATE_RATIO = 1032  # the highest compression ratio that deflate can reach


def is_idx_images(path: Path) -> bool:
    """Return whether a file is named like train-images-idx3-ubyte.gz."""
    return path.name.endswith(IMAGE_FILE_SUFFIXES)


def labels_path(path: Path) -> Path:
    """Return the path of the labels for a file of images.

    The labels of train-images-idx3-ubyte.gz are in train-labels-idx1-ubyte.gz.
    """
    stem, _, ending = path.name.rpartition(IMAGES)
    return path.with_name(f"{stem}{LABELS}{ending.replace('idx3', 'idx1')}")


def read_idx(path: str | Path) -> Iterator[LabelledImage]:
    """Yield the images of a file with their labels, which are read from the file at `labels_path(path)`."""
    import numpy as np

    path = Path(path)
    images = read_idx_array(path, ndim=3)
    labels = read_idx_array(safe_join(path.parent, labels_path(path).name), ndim=1)
    if len(images) != len(labels):
        raise FileError(
            f"{path} holds {len(images)} images, but {labels_path(path).name} holds {len(labels)} labels; "
            f"give one label for each image"
        )
    for image, label in zip(images, labels.tolist(), strict=True):
        yield LabelledImage(image[None].astype(np.float32) / np.float32(255), label)  # (1, height, width)


def read_idx_array(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `ndim` axes into an array; the header gives its shape."""
    import numpy as np

    try:
        with open_regular(path) as raw_file, gzip.open(raw_file) if path.suffix == ".gz" else raw_file as file:
            shape = _read_shape(cast(BinaryIO, file), path, ndim)
            size = math.prod(shape)
            if size > path.stat().st_size * (MAX_DEFLATE_RATIO if path.suffix == ".gz" else 1):
                raise FileError(f"{path} is too short for the {'×'.join(map(str, shape))} bytes that its header states")
            check_expansion(path, size)
            raw = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise FileError(f"{path} is not a complete .gz file: {problem!s:.60}") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if len(raw) != size:
        comparison = "more" if len(raw) > size else "fewer"
        raise FileError(f"{path} holds {comparison} bytes than the {'×'.join(map(str, shape))} that its header states")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _read_shape(file: BinaryIO, path: Path, ndim: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * ndim)
    if len(header) < 4 + 4 * ndim or header[:4] != bytes((0, 0, UINT8_TYPE_CODE, ndim)):
        axes = f"{ndim} ax{'i' if ndim == 1 else 'e'}s"
        raise FileError(f"{path} is not an IDX file of bytes with {axes}: its header is wrong")
    shape = tuple(int.from_bytes(header[start : start + 4], "big") for start in range(4, 4 + 4 * ndim, 4))
    if not all(shape):
        raise FileError(f"{path} states the shape {'×'.join(map(str, shape))}; no size may be 0")
    return shape
