"""Images as a model reads them: read in every form that users have them in, resized, scaled, normalized; training data.

An image is a picture (PNG, JPEG, WebP, GIF, BMP) or a .npz file, by its path; a picture of Pillow; or an array or a
tensor, of shape (height, width), (channels, height, width) or (height, width, channels), with values from 0 to 255 as
uint8 or from 0 to 1 as floats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from monoblock.config.model import ModelConfig, PatchConfig
from monoblock.config.presets import preset
from monoblock.data.augment import augment, uniform_numbers
from monoblock.data.batches import BatchIndices
from monoblock.data.readers.images import (
    PICTURE_SUFFIXES,
    channels_first,
    check_pixel_range,
    picture_size,
    read_arrays,
    read_picture,
)
from monoblock.data.readers.records import LabelledImage, LabelledPicture
from monoblock.errors import FileError, InputError
from monoblock.tasks.task_data import TaskData, TaskInputs, class_indices
from monoblock.training.collate import SpecialTokenIds, TensorBatch
from monoblock.untrusted_files import Folder, reading

PREPROCESSOR_FILE = "preprocessor_config.json"
ARRAY_SUFFIX = ".npz"
RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # the numbers of Pillow, which preprocessor_config.json has
Pixels = NDArray[np.float32]  # of shape (channels, height, width), with values from 0 to 1
Image = Tensor | NDArray[np.generic] | os.PathLike[str]  # what `read_image` reads; also a str, a picture of Pillow


@dataclass(frozen=True)
class ImagePreprocessing:
    """What is done to the pixels, from 0 to 1, of an image: resize it, and map them to (scale × pixels − mean) / std.

    mean, std: one number for each channel, or one for all. The default maps pixels from 0 to 1 to −1 to 1.
    margin: None leaves the size of images alone; a model of 224 pixels resizes to 224 × `margin`, and cuts out the
        centre.
    resample: how images are resized: "bilinear", "bicubic" or "nearest".
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    scale: float = 1.0
    margin: float | None = None
    resample: str = "bilinear"

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (self.scale * pixels - mean) / std

    def resize(self, pixels: Tensor, image: int) -> Tensor:
        """Return pixels (channels, height, width) with the size `image` × `image`, unless they are left alone."""
        if self.margin is None or pixels.shape[-2:] == (image, image):
            return pixels
        side = round(image * self.margin)
        start = (side - image) // 2
        return resize_pixels(pixels, side, self.resample)[:, start : start + image, start : start + image]


def resize_pixels(pixels: Tensor, side: int, resample: str = "bilinear") -> Tensor:
    """Resize pixels (channels, height, width) to (channels, side, side), as Pillow does; they keep their dtype."""
    if resample == "nearest":
        return F.interpolate(pixels[None], (side, side), mode="nearest-exact")[0]
    resized = F.interpolate(pixels[None], (side, side), mode=resample, align_corners=False, antialias=True)[0]
    return resized.clamp(0, 1) if pixels.is_floating_point() else resized


def read_image_preprocessing(folder: Folder) -> ImagePreprocessing:
    """Read preprocessor_config.json in the folder of a model; without such a file, return the default."""
    if not folder.has(PREPROCESSOR_FILE):
        return ImagePreprocessing()
    data, where = folder.read_json(PREPROCESSOR_FILE), folder.path / PREPROCESSOR_FILE
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    if data.get("do_normalize") is not False:
        mean = _channel_values(data.get("image_mean"), where)
        std = _channel_values(data.get("image_std"), where, nonzero=True)
    factor = data.get("rescale_factor", 1 / 255) if data.get("do_rescale") is not False else 1
    if type(factor) not in (int, float) or not factor > 0:
        raise FileError(f"{where}: rescale_factor={factor!r:.40} must be a number above 0, such as 1/255")
    if data.get("do_resize", "size" in data) is not True:
        return ImagePreprocessing(mean, std, 255 * factor)
    resample = data.get("resample", 2)
    if resample not in RESAMPLING or type(resample) is not int:
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLING.items())
        raise FileError(f"{where}: resample={resample!r:.40} is not known here; write one of {known}")
    size, margin = _side(data.get("size"), where, "size"), 1.0
    if data.get("do_center_crop", False) is True:
        margin = size / _side(data.get("crop_size", size), where, "crop_size")
    return ImagePreprocessing(mean, std, 255 * factor, margin, RESAMPLING[resample])


def _side(value: Any, where: Path, name: str) -> int:
    sides = set(value.values()) if isinstance(value, dict) else {value}
    side = next(iter(sides), None)
    if len(sides) != 1 or type(side) is not int or side < 1:
        raise FileError(f'{where}: {name}={value!r:.60} is not the size of a square; write {{"height": 8, "width": 8}}')
    return side


def _channel_values(value: Any, where: Path, *, nonzero: bool = False) -> tuple[float, ...]:
    """Return image_mean or image_std as a tuple; raise FileError unless it is a list of one or three numbers."""
    if value is None:
        return (0.5,)
    numbers = isinstance(value, list) and all(isinstance(one, int | float) for one in value)
    if not numbers or len(value) not in (1, 3) or (nonzero and 0 in value):
        raise FileError(
            f"{where}: image_mean and image_std must be lists of 1 or 3 numbers, and image_std must not contain 0"
        )
    return tuple(map(float, value))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_image(image: Any, config: PatchConfig, preprocessing: ImagePreprocessing | None = None) -> Tensor:
    """Return the pixels of one image from 0 to 1, of the shape (channels, height, width) that a model reads.

    Raise InputError if it has another size, unless the preprocessing resizes images, or is not one image.
    """
    if isinstance(image, str | os.PathLike):
        images = read_pixels(image, config, preprocessing)
        if len(images) != 1:
            raise InputError(
                f"{os.fspath(image)} has {len(images)} images, but predict reads one per file; try monoblock evaluate"
            )
        return torch.from_numpy(images[0])
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # a picture of Pillow
        image = np.array(image.convert("L" if config.channels == 1 else "RGB"))
    pixels = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if pixels.dim() == 2:
        pixels = pixels[None]
    elif pixels.dim() == 3 and pixels.shape[-1] == config.channels != pixels.shape[0]:  # the channels come last
        pixels = pixels.permute(2, 0, 1)
    return prepare_pixels(pixels, config, preprocessing, "the input")


def prepare_pixels(
    pixels: Tensor, config: PatchConfig, preprocessing: ImagePreprocessing | None, name: object
) -> Tensor:
    """Resize an image (channels, height, width) if the model does, and return it with floats from 0 to 1."""
    expected = (config.channels, config.image, config.image)
    if preprocessing is not None and pixels.dim() == 3 and pixels.shape[0] == config.channels:
        pixels = preprocessing.resize(pixels, config.image)
    _check_shape(name, tuple(pixels.shape), expected)
    if not pixels.dtype.is_floating_point:
        if pixels.dtype != torch.uint8:
            raise InputError(
                f"{name} has pixels of type {pixels.dtype}; give uint8 from 0 to 255, or floats from 0 to 1"
            )
        return pixels.float() / 255
    check_pixel_range(pixels.float().numpy(), str(name))
    return pixels.float()


def read_pixels(
    path: str | os.PathLike[str], config: PatchConfig, preprocessing: ImagePreprocessing | None = None
) -> list[Pixels]:
    """Read the images in a file, each as an array of shape (channels, height, width) with pixels from 0 to 1.

    Raise InputError if an image has another shape than the model reads, which `config` describes, unless the
    preprocessing resizes it.
    """
    path = Path(path)
    suffix, known = path.suffix.lower(), (ARRAY_SUFFIX, *PICTURE_SUFFIXES)
    if suffix not in known:
        raise InputError(f"{path} is not an image file; this model reads {', '.join(known)} files")
    if not path.is_file():
        raise FileError(f"there is no file {path}; give the path of an image")
    expected = (config.channels, config.image, config.image)

    def check_size(height: int, width: int) -> None:
        if preprocessing is None or preprocessing.margin is None:
            _check_shape(path, (config.channels, height, width), expected)

    with reading(path):
        images = [read_picture(path, config.channels, check_size)] if suffix != ARRAY_SUFFIX else _read_npz(path)
        return [prepare_pixels(torch.from_numpy(image), config, preprocessing, path).numpy() for image in images]


def _check_shape(name: object, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape == expected:
        return
    actual, needed = (" × ".join(map(str, sizes)) for sizes in (shape, expected))
    is_square = len(shape) == 3 and shape[0] == expected[0] and shape[1] == shape[2]
    advice = f"resize it, or give --interpolate {shape[1]}" if is_square else "resize it"
    raise InputError(f"{name} holds an image of {actual}, but this model reads {needed}; {advice}")


def _read_npz(path: Path) -> list[NDArray[Any]]:
    """Return the images of a .npz file, each of shape (channels, height, width), as uint8 or as floats from 0 to 1."""
    images: Any = read_arrays(path, ("images",))[0]
    if images.ndim not in (3, 4) or images.dtype.kind not in "uf" or not len(images):
        raise FileError(
            f"{path}: the array 'images' is {images.dtype} of shape {images.shape}; it must be uint8, or float from 0 "
            "to 1, of shape (count, height, width) or (count, channels, height, width)"
        )
    check_pixel_range(images, path)
    if images.dtype.kind == "u" and images.dtype != np.uint8:
        images = images / np.iinfo(images.dtype).max
    images = channels_first(images)
    return [np.ascontiguousarray(image).reshape(-1, *images.shape[-2:]) for image in images]


# -- training ---------------------------------------------------------------------------------------------------------


def build_image_data(inputs: TaskInputs, augmentations: dict[str, Any]) -> TaskData:
    """Build the training data of a recipe: square images of one size, augmented differently in every epoch.

    Images are resized to model.image × model.image if the recipe says so, else they must have one size.
    """
    recipe, train, valid, labels = inputs.recipe, inputs.train, inputs.valid, inputs.labels
    known = preset(recipe.model["preset"]) if "preset" in recipe.model else inputs.config
    patches = known.input if isinstance(known, ModelConfig) else None
    size, channels = (
        recipe.model.get(name, getattr(patches, name) if isinstance(patches, PatchConfig) else None)
        for name in ("image", "channels")
    )
    rows = [*train.rows, *(() if valid is None else valid.rows)]
    headers = {picture_size(row.path) for row in rows if isinstance(row, LabelledPicture)}
    if headers:
        sizes = sorted({(height, width) for _, height, width in headers})
        if size is None and (len(sizes) > 1 or sizes[0][0] != sizes[0][1]):
            shown = " and of ".join(f"{height}×{width}" for height, width in sizes[:2])
            raise FileError(
                f"{train.name} holds pictures of {shown} pixels; write model.image=32, or another size, to resize"
            )
        size = sizes[0][0] if size is None else size
        channels = max(header.channels for header in headers) if channels is None else channels
    pixels, targets = stack_images(train.rows, train.name, size, channels), torch.tensor(class_indices(train, labels))
    channels, height, width = pixels.shape[1:]
    if height != width:
        raise FileError(
            f"{train.name} holds images of {height}×{width}; make them square: pad or crop them, or write "
            f"model.image={min(height, width)} to resize them"
        )
    valid_pixels, valid_targets = torch.empty(0), torch.empty(0)
    if valid is not None:
        valid_pixels = stack_images(valid.rows, valid.name, size, channels)
        if valid_pixels.shape[1:] != pixels.shape[1:]:
            actual, needed = (" × ".join(map(str, one.shape[1:])) for one in (valid_pixels, pixels))
            raise FileError(
                f"{train.name} has training images of {needed} and validation images of {actual}; make them one size"
            )
        valid_targets = torch.tensor(class_indices(valid, labels))

    def unit_range(images: Tensor) -> Tensor:
        """Return pixels from 0 to 1; those of pictures are stored as uint8, in a quarter of the memory."""
        return images if images.is_floating_point() else images.float() / 255

    def build_batch(batch: BatchIndices) -> TensorBatch:
        indices = torch.tensor(batch.indices)
        images = unit_range(pixels[indices])
        if augmentations:
            numbers = uniform_numbers(recipe.train.seed, batch.epoch, len(train))[batch.indices]
            images = augment(images, torch.from_numpy(numbers), **augmentations)
        return TensorBatch({"source": 2 * images - 1}, targets[indices], batch.epoch, batch.indices.tolist())

    def evaluation_batches() -> Iterator[TensorBatch]:
        batch = recipe.train.batch
        for images, classes in zip(valid_pixels.split(batch), valid_targets.split(batch), strict=True):
            yield TensorBatch({"source": 2 * unit_range(images) - 1}, classes, 0, [])

    summary = f"{len(train):,} images of {height}×{width} to train on"
    summary += ", to which images of other sizes are resized" if size is not None else ""
    summary += f", varied by {', '.join(augmentations)}" if augmentations else ""
    preprocessing = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }
    return TaskData(
        None,
        SpecialTokenIds(),
        inputs.fixed_plan(len(train)),
        build_batch,
        None if valid is None else evaluation_batches,
        model_sizes={"classes": len(labels), "channels": channels, "image": height},
        labels=labels,
        summary=summary,
        unit="images",
        model_files={} if size is None else {PREPROCESSOR_FILE: preprocessing},
    )


def stack_images(
    rows: Sequence[LabelledImage | LabelledPicture], name: str, size: int | None = None, channels: int | None = None
) -> Tensor:
    """Stack images into a tensor of shape (count, channels, height, width): uint8, or floats from 0 to 1.

    name: the name of the corpus, for error messages.
    size, channels: the width to which images are resized, and the number of channels as which pictures are read; None
        leaves images as they are, and then they must have one shape.
    """
    resized = []
    for row in rows:
        pixels = read_picture(row.path, channels or 3) if isinstance(row, LabelledPicture) else row.pixels
        image = torch.from_numpy(pixels)
        resized.append(image if size is None or image.shape[1:] == (size, size) else resize_pixels(image, size))
    shapes = {tuple(image.shape) for image in resized}
    if len(shapes) > 1:
        first, second, *_ = ("×".join(map(str, shape)) for shape in sorted(shapes))
        raise FileError(f"{name} holds images of {first} and of {second}; make them one size")
    return torch.stack(resized)
