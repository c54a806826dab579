"""Read labelled images from .npz files of numpy."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from monoblock.data.readers.records import LabelledImage
from monoblock.errors import FileError
from monoblock.untrusted_files import check_expansion, open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

READ_BYTES = 2**20


def read_images(path: str | Path) -> Iterator[LabelledImage]:
    """Yield the labelled images of a .npz file with the arrays "images" and "labels".

    "images" has shape (count, height, width), (count, channels, height, width) or (count, height, width, channels), and
    "labels" has shape (count,).
    """
    import numpy as np

    images, labels = _load_arrays(path)
    images = channels_first(images)
    check_pixel_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    for pixels, label in zip(images, labels, strict=True):
        yield LabelledImage((pixels / scale).astype(np.float32).reshape(-1, *images.shape[-2:]), int(label))


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """Return images of shape (count, height, width, channels) as (count, channels, height, width), others unchanged."""
    is_last = images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3)
    return images.transpose(0, 3, 1, 2) if is_last else images


def read_arrays(path: str | Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read arrays of a .npz file by their names; their headers state their sizes, which are checked before reading."""
    arrays: list[NDArray[Any]] = []
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            for name in names:
                if f"{name}.npy" not in members:
                    example = ", ".join(f"{name}=…" for name in names)
                    raise FileError(f"{path} lacks the array {name!r}; save the file with np.savez(path, {example})")
                member = members[f"{name}.npy"]
                check_expansion(path, sum(array.nbytes for array in arrays) + member.file_size)
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise FileError(f"{path} is not a .npz file of numpy: {name!r} is compressed in another way")
                with archive.open(member) as stream:
                    arrays.append(_read_npy(stream, member.file_size))
    except FileError:
        raise
    except Exception as problem:  # damage shows in many ways: zlib.error, struct.error, SyntaxError, …
        reason = " ".join(str(problem).split())[:80]
        raise FileError(f"{path} is not a .npz file of plain arrays: {reason or type(problem).__name__}") from problem
    return arrays


def _read_npy(stream: IO[bytes], size: int) -> NDArray[Any]:
    """Read an array from a .npy file of `size` bytes; raise ValueError unless its header states that size."""
    import numpy as np

    versions = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in versions:
        raise ValueError(f"the version {version} of its header is not known")
    shape, fortran_order, dtype = versions[version](stream)
    if dtype.hasobject or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError("it has Python objects, or a negative size")  # objects would be unpickled
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > size:
        raise ValueError(f"its header states {nbytes:,} bytes, but the file has {size:,}")
    raw = np.empty(nbytes, np.uint8)
    for start in range(0, nbytes, READ_BYTES):  # the archive would copy what it reads at once
        chunk = stream.read(min(READ_BYTES, nbytes - start))
        raw[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
        if len(chunk) < min(READ_BYTES, nbytes - start):
            raise ValueError("it ends early")
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    return raw.view(dtype).reshape(shape, order=order)


def _load_arrays(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = read_arrays(path, ("images", "labels"))
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        shapes = f"images of shape {images.shape} and {labels.dtype} labels of shape {labels.shape}"
        raise FileError(
            f"{path} holds {shapes}; give images of shape (count, height, width) or (count, channels, height, width) "
            f"and integer labels of shape (count,)"
        )
    if images.dtype.kind not in "uf" or not len(images):
        shape = f"{images.shape} and dtype {images.dtype}"
        raise FileError(
            f"{path} holds images of shape {shape}; give at least one image, as uint8 or as floats from 0 to 1"
        )
    return images, labels


def check_pixel_range(images: NDArray[Any], path: str | Path) -> None:
    """Raise FileError if float pixels lie outside [0, 1] or are NaN."""
    if images.dtype.kind == "f" and not ((images >= 0) & (images <= 1)).all():  # NaN fails both comparisons
        low, high = images.min(), images.max()
        raise FileError(
            f"{path}: pixels range from {low:g} to {high:g}; write floats from 0 to 1, or uint8 from 0 to 255"
        )
