"""Training data for the classification of images, which are augmented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.data.augment import augment, uniform_numbers
from monoblock.data.batches import BatchIndices
from monoblock.data.readers.images import picture_size, read_picture
from monoblock.data.readers.records import LabelledImage, LabelledPicture
from monoblock.errors import FileError
from monoblock.recipes.model_config import image_channels, image_size
from monoblock.tasks.image_inputs import PREPROCESSOR_FILE, preprocessor_fields, resize_pixels
from monoblock.tasks.labels import class_indices
from monoblock.tasks.task_data import TaskData, TaskInputs
from monoblock.training.collate import SpecialTokenIds, TensorBatch


def build_image_data(inputs: TaskInputs, augmentations: dict[str, Any]) -> TaskData:
    """Build the training data of a recipe: square images of one size, augmented differently in every epoch.

    Images are resized to model.image × model.image if the recipe says so, else they must have one size.
    """
    recipe, train, valid, labels = inputs.recipe, inputs.train, inputs.valid, inputs.labels
    size, channels = image_size(recipe), image_channels(recipe)
    corpora = [corpus for corpus in (train, valid) if corpus is not None]
    if any(isinstance(corpus.rows[0], LabelledPicture) for corpus in corpora):
        size, channels = _picture_size([row for corpus in corpora for row in corpus.rows], train.name, size, channels)
    pixels, targets = stack_images(train.rows, train.name, size, channels), torch.tensor(class_indices(train, labels))
    channels, height, width = pixels.shape[1:]
    if height != width:
        raise FileError(
            f"{train.name} holds images of {height}×{width}; make them square: pad or crop them, or write "
            f"model.image={min(height, width)} to resize them"
        )
    valid_pixels = None if valid is None else stack_images(valid.rows, valid.name, size, channels)
    if valid_pixels is not None and valid_pixels.shape[1:] != pixels.shape[1:]:
        actual, needed = _format_shapes(valid_pixels.shape[1:], pixels.shape[1:])
        raise FileError(
            f"{train.name} has training images of {needed} and validation images of {actual}; make them one size"
        )
    valid_targets = None if valid is None else torch.tensor(class_indices(valid, labels))
    section = recipe.train

    def build_batch(batch: BatchIndices) -> TensorBatch:
        indices = torch.tensor(batch.indices)
        images = unit_range(pixels[indices])
        if augmentations:
            numbers = uniform_numbers(section.seed, batch.epoch, len(train))[batch.indices]
            images = augment(images, torch.from_numpy(numbers), **augmentations)
        return TensorBatch({"source": scale_pixels(images)}, targets[indices], batch.epoch, batch.indices.tolist())

    def evaluation_batches() -> Iterator[TensorBatch]:
        assert valid_pixels is not None
        assert valid_targets is not None
        for start in range(0, len(valid_pixels), section.batch):
            rows = slice(start, start + section.batch)
            yield TensorBatch({"source": scale_pixels(unit_range(valid_pixels[rows]))}, valid_targets[rows], 0, [])

    summary = f"{len(train):,} images of {height}×{width} to train on"
    summary += ", to which images of other sizes are resized" if size is not None else ""
    return TaskData(
        None,
        SpecialTokenIds(),
        inputs.fixed_plan(len(train)),
        build_batch,
        None if valid is None else evaluation_batches,
        model_sizes={"classes": len(labels), "channels": channels, "image": height},
        labels=labels,
        summary=f"{summary}, varied by {', '.join(augmentations)}" if augmentations else summary,
        unit="images",
        model_files={} if size is None else {PREPROCESSOR_FILE: preprocessor_fields(size, channels)},
    )


def _picture_size(
    rows: Sequence[LabelledImage | LabelledPicture], name: str, size: int | None, channels: int | None
) -> tuple[int, int]:
    """Return the width and the number of channels as which pictures are read, from their headers if not given."""
    headers = {picture_size(row.path) for row in rows if isinstance(row, LabelledPicture)}
    if size is None:
        sizes = sorted({(height, width) for _, height, width in headers})
        if len(sizes) > 1 or sizes[0][0] != sizes[0][1]:
            shown = " and of ".join(f"{height}×{width}" for height, width in sizes[:2])
            raise FileError(
                f"{name} holds pictures of {shown} pixels; write model.image=32, or another size, to resize"
            )
        size = sizes[0][0]
    return size, channels if channels is not None else max(header.channels for header in headers)


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


def unit_range(pixels: Tensor) -> Tensor:
    """Return pixels as floats from 0 to 1; those of pictures are stored as uint8, in a quarter of the memory."""
    return pixels if pixels.is_floating_point() else pixels.float() / 255


def scale_pixels(pixels: Tensor) -> Tensor:
    """Map pixels from the range [0, 1] to [−1, 1], the range of a model's inputs."""
    return 2 * pixels - 1


def _format_shapes(*shapes: Sequence[int]) -> list[str]:
    return [" × ".join(map(str, shape)) for shape in shapes]
