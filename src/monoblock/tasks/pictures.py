"""Images as ground: all pixels in one array, so that a batch is one look-up, varied at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monoblock.config import PatchConfig
from monoblock.data.augment import augment, chances
from monoblock.data.batches import Batch
from monoblock.data.corpora import Corpus
from monoblock.data.readers import Image
from monoblock.errors import FileError, InputError
from monoblock.schema import to_dict
from monoblock.tasks.ground import Ground, fixed_plan
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.seeing import remedy
from monoblock.training.objectives import Prepared, Special


def images(recipe: Recipe, train: Corpus, valid: Corpus | None, labels: list[str]) -> Ground:
    pixels, wanted = stacked(train.rows, train.name), numbered(train, labels)
    channels, height, width = pixels.shape[1:]
    if height != width:
        raise FileError(f"{train.name} holds images of {height}×{width}; make them square: pad or cut them")
    held = None if valid is None else stacked(valid.rows, valid.name)
    if held is not None and held.shape[1:] != pixels.shape[1:]:
        has, needs = (" × ".join(map(str, one.shape[1:])) for one in (held, pixels))
        raise FileError(f"{train.name} validates on images of {has} and trains on {needs}; make them one size")
    right = None if valid is None else numbered(valid, labels)
    part, varied = recipe.train, {key: value for key, value in to_dict(recipe.data.augment).items() if value}

    def make(batch: Batch) -> Prepared:
        chosen = torch.tensor(batch.samples)
        found = pixels[chosen]
        if varied:
            drawn = chances(part.seed, batch.epoch, len(train))[batch.samples]
            found = augment(found, torch.from_numpy(drawn), **varied)
        return Prepared({"source": scaled(found)}, wanted[chosen], batch.epoch, batch.samples.tolist())

    def evaluation() -> Iterator[Prepared]:
        assert held is not None
        assert right is not None
        for first in range(0, len(held), part.batch):
            place = slice(first, first + part.batch)
            yield Prepared({"source": scaled(held[place])}, right[place], 0, [])

    said = f"{len(train):,} images of {height}×{width} to train on"
    return Ground(
        None,
        Special(),
        fixed_plan(recipe, len(train)),
        make,
        None if valid is None else evaluation,
        sizes={"classes": len(labels), "channels": channels, "image": height},
        labels=labels,
        said=f"{said}, varied by {', '.join(varied)}" if varied else said,
        unit="images",
    )


def stacked(rows: Sequence[Image], name: str) -> Tensor:
    """Images of one shape: (count, channels, height, width), from 0 to 1."""
    shapes = {row.pixels.shape for row in rows}
    if len(shapes) > 1:
        first, second, *_ = ("×".join(map(str, shape)) for shape in sorted(shapes))
        raise FileError(f"{name} holds images of {first} and of {second}; make them one size")
    return torch.from_numpy(np.stack([row.pixels for row in rows]))


def scaled(pixels: Tensor) -> Tensor:
    """As the model reads them: from −1 to 1."""
    return 2 * pixels - 1


def fits(model: Any, shape: tuple[int, ...], name: str) -> None:
    """One line for images of another size than the model looks at."""
    config: PatchConfig = model.config.input
    wanted = (config.channels, config.image, config.image)
    if shape != wanted:
        has, needs = (" × ".join(map(str, one)) for one in (shape, wanted))
        raise InputError(f"{name} holds images of {has}, and this model looks at {needs}; {remedy(shape, wanted)}")


def numbered(corpus: Corpus, labels: Sequence[str]) -> Tensor:
    """The class of each image: the place of its label among those of training."""
    place = {label: number for number, label in enumerate(labels)}
    unknown = next((row.label for row in corpus.rows if str(row.label) not in place), None)
    if unknown is not None:
        split = f"{corpus.name}, split {corpus.split}"
        raise InputError(f"{split}: the label {unknown} was not seen in training, which has {', '.join(labels):.60}")
    return torch.tensor([place[str(row.label)] for row in corpus.rows])
