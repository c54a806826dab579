"""A vision model for images of another size than it was trained on: its places interpolated, all else as it is."""

from __future__ import annotations

from dataclasses import replace

import torch

from monoblock.config import Learned, PatchConfig
from monoblock.embedding import Patches
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.positions import regrid

TABLE = "input.position.weight"


def interpolated(model: Transformer, image: int) -> Transformer:
    """The same model for images of image × image pixels, with weights of its own.

    Added places, learned ones or sinusoids, are read off between those there are (bicubic) and are a learned table from
    then on; the class token keeps its own.  Where none are added nothing but the size changes.
    """
    patches, part = model.input, model.config.input
    if not (isinstance(patches, Patches) and isinstance(part, PatchConfig)):
        raise InputError(
            f"a {model.config.family} model reads no images: there are no places of patches to interpolate"
        )
    if image < 1 or image % part.patch:
        nearest = max(1, round(image / part.patch)) * part.patch
        raise InputError(f"images of {image} pixels are not cut by patches of {part.patch}; resize them to {nearest}")
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    places = part.positions
    if places is not None:
        table = patches.places().detach()
        weights[TABLE] = torch.cat((table[: part.first], regrid(table[part.first :], image // part.patch)))
        places = Learned()
    config = replace(model.config, input=replace(part, image=image, positions=places))
    with torch.device("meta"):  # nothing is drawn
        other = Transformer(config)
    other.load_state_dict(weights, assign=True)
    return other.train(model.training)
