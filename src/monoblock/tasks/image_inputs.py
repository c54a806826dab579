"""Read images from .npz files and pictures (PNG, JPEG, WebP, GIF, BMP), and normalize them as a model expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monoblock.config.model import PatchConfig
from monoblock.data.readers.npz import check_pixel_range, read_arrays
from monoblock.errors import FileError, InputError, MonoblockError
from monoblock.untrusted_files import has_file, open_regular, read_json, reading, safe_join

PREPROCESSOR_FILE = "preprocessor_config.json"
ARRAY_SUFFIXES, IMAGE_SUFFIXES = (".npz",), (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # in the words of Pillow
MAX_PIXELS = 2**23
WEBP_HEADER_BYTES = 30
Pixels = NDArray[np.float32]  # of shape (channels, height, width), with values from 0 to 1
Image = Tensor | NDArray[np.generic]  # an image of that shape and range, as a tensor or an array


class ImageNormalization(NamedTuple):
    """Normalize each channel to (pixels - mean) / std; the default maps pixels in [0, 1] to [−1, 1]."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self)
        return (pixels - mean) / std


def read_image_normalization(folder: Path) -> ImageNormalization:
    """Read the mean and the standard deviation of each channel from preprocessor_config.json in a Hugging Face folder.

    If there is no such file, return the default, ImageNormalization().
    """
    if not (folder.is_dir() and has_file(folder, PREPROCESSOR_FILE)):
        return ImageNormalization()
    data = read_json(safe_join(folder, PREPROCESSOR_FILE))
    if data.get("do_normalize") is False:
        return ImageNormalization((0.0,), (1.0,))
    default = ImageNormalization()
    mean = _channel_values(data.get("image_mean"), default.mean, folder)
    std = _channel_values(data.get("image_std"), default.std, folder, nonzero=True)
    return ImageNormalization(mean, std)


def _channel_values(
    value: Any, default: tuple[float, ...], folder: Path, *, nonzero: bool = False
) -> tuple[float, ...]:
    """Return image_mean or image_std as a tuple; raise FileError unless it is a list of one or three numbers."""
    if value is None:
        return default
    numbers = isinstance(value, list) and all(isinstance(one, int | float) for one in value)
    if not numbers or len(value) not in (1, 3) or (nonzero and 0 in value):
        raise FileError(
            f"{folder / PREPROCESSOR_FILE}: "
            "image_mean and image_std must be lists of 1 or 3 numbers, and image_std must not contain 0"
        )
    return tuple(map(float, value))


def read_pixels(path: str | Path, config: PatchConfig) -> list[Pixels]:
    """Read the images in a file, each as an array of shape (channels, height, width).

    Raise InputError if an image has another shape than the model reads, which `config` describes.
    """
    path = Path(path)
    suffix, known = path.suffix.lower(), (*ARRAY_SUFFIXES, *IMAGE_SUFFIXES)
    if suffix not in known:
        raise InputError(f"{path} is not an image file; this model reads {', '.join(known)} files")
    if not path.is_file():
        raise FileError(f"there is no file {path}; give the path of an image")
    expected = (config.channels, config.image, config.image)
    with reading(path):
        if suffix not in ARRAY_SUFFIXES:
            return [_read_image(path, expected)]
        images = _read_npz(path)
        for pixels in images:
            _check_shape(path, pixels.shape, expected)
        return images


def _check_shape(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        actual, needed = (" × ".join(map(str, sizes)) for sizes in (shape, expected))
        advice = resize_hint(shape, expected)
        raise InputError(f"{path} holds an image of {actual}, but this model reads {needed}; {advice}")


def resize_hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return the part of an error message that says what to do with an image that has not the expected shape."""
    square = len(shape) == 3 and shape[0] == expected[0] and shape[1] == shape[2]
    return f"resize it, or give --interpolate {shape[1]}" if square else "resize it"


def _read_npz(path: Path) -> list[Pixels]:
    images: Any = read_arrays(path, ("images",))[0]
    if images.ndim not in (3, 4) or images.dtype.kind not in "uf" or not len(images):
        raise FileError(
            f"{path}: the array 'images' is {images.dtype} of shape {images.shape}; it must be uint8, or float from 0 "
            "to 1, of shape (count, height, width) or (count, channels, height, width)"
        )
    check_pixel_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    return [(image / scale).astype(np.float32).reshape(-1, *images.shape[-2:]) for image in images]


def _read_image(path: Path, expected: tuple[int, int, int]) -> Pixels:
    """Read a picture; its header states its size, which is checked before the pixels are decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise FileError(
            f"{path}: reading pictures needs Pillow; run pip install 'monoblock[plot]', or give an .npz file"
        ) from None
    channels, height, width = expected
    if height * width > MAX_PIXELS:
        raise FileError(f"{path}: pictures of more than {MAX_PIXELS:,} pixels are not decoded; give an .npz file")
    try:
        with open_regular(path) as file:
            size = webp_size(file.read(WEBP_HEADER_BYTES))  # Pillow decodes a WebP file when it opens it
            if size is not None:
                _check_shape(path, (channels, *size), expected)
            file.seek(0)
            with Image.open(file, formats=PICTURE_FORMATS) as picture:  # other formats start programs
                _check_shape(path, (channels, picture.height, picture.width), expected)
                values: Any = np.asarray(picture.convert("L" if channels == 1 else "RGB"), np.float32)
    except MonoblockError:
        raise
    except UnidentifiedImageError:
        raise FileError(f"{path} is not a picture in one of the formats {', '.join(PICTURE_FORMATS)}") from None
    except Exception as problem:  # a damaged picture raises anything, also SyntaxError
        raise FileError(f"{path} cannot be read as a picture: {' '.join(str(problem).split())[:80]}") from problem
    values /= 255
    return values[None] if channels == 1 else np.ascontiguousarray(values.transpose(2, 0, 1))


def webp_size(header: bytes) -> tuple[int, int] | None:
    """Return the height and width that the first bytes of a WebP file state; None if it is in another format."""
    if header[:4] != b"RIFF" or header[8:12] != b"WEBP":
        return None
    chunk = header[12:16]
    if chunk == b"VP8X":  # 24 bits each, minus one
        return int.from_bytes(header[27:30], "little") + 1, int.from_bytes(header[24:27], "little") + 1
    if chunk == b"VP8L":  # 14 bits each, minus one, after a signature byte
        bits = int.from_bytes(header[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 ":  # 14 bits each, after the frame tag and the start code
        return int.from_bytes(header[28:30], "little") & 0x3FFF, int.from_bytes(header[26:28], "little") & 0x3FFF
    return 0, 0
