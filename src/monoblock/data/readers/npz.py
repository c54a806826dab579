"""Read labelled images from .npz files of numpy."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.data.readers.records import LabelledImage
from monoblock.errors import FileError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_images(path: str | Path) -> Iterator[LabelledImage]:
    """Yield the labelled images of a .npz file with the arrays "images" and "labels".

    "images" has shape (count, height, width) or (count, channels, height, width), and "labels" has shape (count,).
    """
    import numpy as np

    images, labels = _load_arrays(path)
    check_pixel_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    for pixels, label in zip(images, labels, strict=True):
        yield LabelledImage((pixels / scale).astype(np.float32).reshape(-1, *images.shape[-2:]), int(label))


def _load_arrays(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    try:
        # Never unpickle: np.load raises ValueError for an array of Python objects.
        with np.load(path, allow_pickle=False) as file:
            missing = {"images", "labels"} - set(file.files)
            if missing:
                raise FileError(
                    f"{path} lacks the array {min(missing)!r}; save the file with np.savez(path, images=…, labels=…)"
                )
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} is not a .npz file of plain arrays: {str(problem).splitlines()[0]:.80}") from None
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
