"""Adapt a vision model to another image size by interpolating its position embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from monoblock.config.model import Learned, PatchConfig
from monoblock.errors import InputError, with_article
from monoblock.nn.arguments import check_model
from monoblock.nn.embedding import PatchEmbedding
from monoblock.nn.lora import fold_lora
from monoblock.nn.transformer import Transformer

T = TypeVar("T", bound=Transformer)

POSITION_WEIGHT = "input.position.weight"


def interpolate(model: T, image: int) -> T:
    """Return a copy of a vision model for images of `image` × `image` pixels.

    The position embeddings of patches, learned or sinusoidal, are resized by bicubic interpolation and become learned
    ones; those of class tokens stay the same.  Adapters are merged into their weights.
    """
    check_model(model, Transformer, "interpolate")
    embedding, config = model.input, model.config.input
    if not (isinstance(embedding, PatchEmbedding) and isinstance(config, PatchConfig)):
        raise InputError(
            f"{with_article(model.config.family)} model has no patch positions to interpolate; give a vision model"
        )
    if image < 1 or image % config.patch:
        nearest = max(1, round(image / config.patch)) * config.patch
        raise InputError(
            f"image={image} cannot be cut into whole patches of {config.patch} pixels; try image={nearest}"
        )
    weights = {name: tensor.detach() for name, tensor in fold_lora(model).state_dict().items()}
    positions = config.positions
    if positions is not None:
        table, first = embedding.position_table().detach(), config.num_class_tokens
        weights[POSITION_WEIGHT] = torch.cat((table[:first], interpolate_grid(table[first:], image // config.patch)))
        positions = Learned()
    with torch.device("meta"):  # skips the random initialization
        copy = type(model)(replace(model.config, input=replace(config, image=image, positions=positions)))
    copy.load_state_dict(weights, assign=True)
    copy.loaded_from = model.loaded_from
    return copy.train(model.training)


def interpolate_grid(table: Float[Tensor, "N D"], side: int) -> Float[Tensor, "{side*side} D"]:
    """Resize the position embeddings of a square grid of patches to side × side by bicubic interpolation.

    Patches are stored row by row.  The old and the new grid cover the whole image, so that their edges coincide and not
    the centres of their outer patches (Dosovitskiy et al. 2021).
    """
    old_side = math.isqrt(table.shape[0])
    grid = table.detach().float().mT.unflatten(-1, (old_side, old_side))[None]  # (1, D, old side, old side)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return grid[0].flatten(1).mT.contiguous().to(table.dtype)
