"""Training data for the classification of images, which are augmented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monoblock.config.model import PatchConfig
from monoblock.config.schema import to_dict
from monoblock.data.augment import augment, uniform_numbers
from monoblock.data.batching.plans import BatchIndices
from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import LabelledImage
from monoblock.errors import FileError, InputError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.classification.section import ClassificationSection
from monoblock.tasks.image_inputs import resize_hint
from monoblock.tasks.labels import label_to_id
from monoblock.tasks.task_data import TaskData, build_fixed_plan
from monoblock.training.collate import SpecialTokenIds, TensorBatch


def build_image_data(
    recipe: Recipe, options: ClassificationSection, train: Corpus, valid: Corpus | None, labels: list[str]
) -> TaskData:
    """Build the training data of a recipe: square images of one size, augmented differently in every epoch."""
    pixels, targets = stack_images(train.rows, train.name), label_ids(train, labels)
    channels, height, width = pixels.shape[1:]
    if height != width:
        raise FileError(f"{train.name} holds images of {height}×{width}; make them square: pad or crop them")
    valid_pixels = None if valid is None else stack_images(valid.rows, valid.name)
    if valid_pixels is not None and valid_pixels.shape[1:] != pixels.shape[1:]:
        actual, needed = _format_shapes(valid_pixels.shape[1:], pixels.shape[1:])
        raise FileError(
            f"{train.name} has training images of {needed} and validation images of {actual}; make them one size"
        )
    valid_targets = None if valid is None else label_ids(valid, labels)
    section = recipe.train
    augmentations = {key: value for key, value in to_dict(options.augment).items() if value}

    def build_batch(batch: BatchIndices) -> TensorBatch:
        indices = torch.tensor(batch.indices)
        images = pixels[indices]
        if augmentations:
            numbers = uniform_numbers(section.seed, batch.epoch, len(train))[batch.indices]
            images = augment(images, torch.from_numpy(numbers), **augmentations)
        return TensorBatch({"source": scale_pixels(images)}, targets[indices], batch.epoch, batch.indices.tolist())

    def evaluation_batches() -> Iterator[TensorBatch]:
        assert valid_pixels is not None
        assert valid_targets is not None
        for start in range(0, len(valid_pixels), section.batch):
            rows = slice(start, start + section.batch)
            yield TensorBatch({"source": scale_pixels(valid_pixels[rows])}, valid_targets[rows], 0, [])

    summary = f"{len(train):,} images of {height}×{width} to train on"
    return TaskData(
        None,
        SpecialTokenIds(),
        build_fixed_plan(recipe, len(train)),
        build_batch,
        None if valid is None else evaluation_batches,
        model_sizes={"classes": len(labels), "channels": channels, "image": height},
        labels=labels,
        summary=f"{summary}, varied by {', '.join(augmentations)}" if augmentations else summary,
        unit="images",
    )


def stack_images(rows: Sequence[LabelledImage], name: str) -> Tensor:
    """Stack images of one shape into a tensor of shape (count, channels, height, width), with pixels from 0 to 1.

    name: the name of the corpus, for error messages.
    """
    shapes = {row.pixels.shape for row in rows}
    if len(shapes) > 1:
        first, second, *_ = ("×".join(map(str, shape)) for shape in sorted(shapes))
        raise FileError(f"{name} holds images of {first} and of {second}; make them one size")
    return torch.from_numpy(np.stack([row.pixels for row in rows]))


def scale_pixels(pixels: Tensor) -> Tensor:
    """Map pixels from the range [0, 1] to [−1, 1], the range of a model's inputs."""
    return 2 * pixels - 1


def check_image_shape(model: Any, shape: tuple[int, ...], name: str) -> None:
    """Raise InputError unless `shape` (channels, height, width) is the one that the model reads."""
    config: PatchConfig = model.config.input
    expected = (config.channels, config.image, config.image)
    if shape != expected:
        actual, needed = _format_shapes(shape, expected)
        advice = resize_hint(shape, expected)
        raise InputError(f"{name} holds images of {actual}, but this model reads {needed}; {advice}")


def _format_shapes(*shapes: Sequence[int]) -> list[str]:
    return [" × ".join(map(str, shape)) for shape in shapes]


def label_ids(corpus: Corpus, labels: Sequence[str]) -> Tensor:
    """Return the class index of each image, of shape (count,); raise InputError for a label that is not in `labels`."""
    ids = label_to_id(labels)
    unknown = next((row.label for row in corpus.rows if str(row.label) not in ids), None)
    if unknown is not None:
        split = f"{corpus.name}, split {corpus.split}"
        raise InputError(
            f"{split}: the label {unknown} was not seen in training; the labels of the model are "
            f"{', '.join(labels):.60}"
        )
    return torch.tensor([ids[str(row.label)] for row in corpus.rows])
