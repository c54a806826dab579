"""Labelled images in numpy's .npz files."""

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
    """Yield the images of a file of two arrays, "images" and "labels".

    "images" is (count, height, width) or (count, channels, height, width), "labels" is (count,).
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
        # Never unpickle: an array of objects in the file is an error here.
        with np.load(path, allow_pickle=False) as file:
            missing = {"images", "labels"} - set(file.files)
            if missing:
                raise FileError(f"{path} lacks the array {min(missing)!r}; save it with images=… and labels=…")
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} is not a .npz file of plain arrays: {str(problem).splitlines()[0]:.80}") from None
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        shapes = f"images {images.shape} and labels {labels.shape} of {labels.dtype}"
        raise FileError(f"{path} holds {shapes}; write images (count, height, width) and integer labels (count,)")
    if images.dtype.kind not in "uf" or not len(images):
        shape = f"{images.dtype} {images.shape}"
        raise FileError(f"{path} holds images of {shape}; give at least one, as uint8 or as floats from 0 to 1")
    return images, labels


def check_pixel_range(images: NDArray[Any], path: str | Path) -> None:
    """Raise FileError if float pixels lie outside [0, 1] or are NaN."""
    if images.dtype.kind == "f" and not ((images >= 0) & (images <= 1)).all():  # NaN fails both comparisons
        low, high = images.min(), images.max()
        raise FileError(
            f"{path}: pixels range from {low:g} to {high:g}; write floats from 0 to 1, or uint8 from 0 to 255"
        )
