"""Images from files, as a model looks at them: .npz arrays and pictures, of its size, with its mean and deviation."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monoblock.config import PatchConfig
from monoblock.data.readers import check_range
from monoblock.errors import FileError, InputError
from monoblock.untrusted import inside, present, read_json

ARRAYS, PICTURES = (".npz",), (".png", ".jpg", ".jpeg")
Pixels = NDArray[np.float32]  # (channels, height, width), from 0 to 1


class Normal(NamedTuple):
    """What is taken off every channel, and what it is divided by."""

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in self)
        return (pixels - mean) / deviation


def normal_in(folder: Path) -> Normal:
    """By preprocessor_config.json, where a folder has one; ours are trained from −1 to 1."""
    if not (folder.is_dir() and present(folder, "preprocessor_config.json")):
        return Normal()
    said = read_json(inside(folder, "preprocessor_config.json"))
    if said.get("do_normalize") is False:
        return Normal((0.0,), (1.0,))
    values = [said.get(name) for name in ("image_mean", "image_std")]
    for given in values:
        numbers = isinstance(given, list) and all(isinstance(one, int | float) for one in given)
        if given is not None and not (numbers and len(given) in (1, 3) and (given is values[0] or 0 not in given)):
            raise FileError(f"{folder / 'preprocessor_config.json'}: image_mean and image_std must be 1 or 3 numbers")
    mean, deviation = (Normal()[n] if given is None else tuple(map(float, given)) for n, given in enumerate(values))
    return Normal(mean, deviation)


def read_pixels(path: str | Path, config: PatchConfig) -> list[Pixels]:
    """The images of a file, each as large as the model's."""
    place = Path(path)
    ending = place.suffix.lower()
    if ending not in (*ARRAYS, *PICTURES):
        raise InputError(f"{place} is no image; this model looks at {', '.join((*ARRAYS, *PICTURES))} files")
    if not place.is_file():
        raise FileError(f"there is no file {place}")
    found = _arrays(place) if ending in ARRAYS else [_picture(place, config.channels)]
    wanted = (config.channels, config.image, config.image)
    for pixels in found:
        if pixels.shape != wanted:
            has, needs = (" × ".join(map(str, shape)) for shape in (pixels.shape, wanted))
            how = remedy(pixels.shape, wanted)
            raise InputError(f"{place} holds an image of {has}, and this model looks at {needs}; {how}")
    return found


def remedy(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What to do about an image of another shape."""
    square = len(shape) == 3 and shape[0] == wanted[0] and shape[1] == shape[2]
    return f"resize it, or give --interpolate {shape[1]}" if square else "resize it"


def _arrays(path: Path) -> list[Pixels]:
    try:
        with np.load(path, allow_pickle=False) as file:  # never a pickle
            if "images" not in file.files:
                raise FileError(f"{path} lacks the array 'images'; save it with images=…")
            images: Any = file["images"]
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} is no .npz file of plain arrays: {str(problem).splitlines()[0]:.80}") from None
    if images.ndim not in (3, 4) or images.dtype.kind not in "uf" or not len(images):
        raise FileError(f"{path}: images of {images.dtype} {images.shape}; write (count, height, width), bytes or 0…1")
    check_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    return [(one / scale).astype(np.float32).reshape(-1, *images.shape[-2:]) for one in images]


def _picture(path: Path, channels: int) -> Pixels:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise FileError(f"{path}: pictures need pillow; install monoblock[plot], or give an .npz file") from None
    try:
        with Image.open(path) as picture:
            values: Any = np.asarray(picture.convert("L" if channels == 1 else "RGB"), np.float32) / 255
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as problem:
        raise FileError(f"{path} cannot be read as a picture: {str(problem).splitlines()[0]:.80}") from None
    return values[None] if channels == 1 else np.ascontiguousarray(values.transpose(2, 0, 1))
