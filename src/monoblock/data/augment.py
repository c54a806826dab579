"""Augment training images: random shifts, rotations, zooms, flips and cutouts.

Each augmentation takes pixels of shape (B, channels, height, width) and `uniform`, random numbers in [0, 1) with one
row per image, and returns pixels of the same shape. The numbers of an image depend only on the seed, the epoch and the
index of the sample, not on the number of ranks and workers, nor on interruptions of the run.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from monoblock.data.batches import random_uint64

NUMBERS_PER_IMAGE = 7  # two for the shift, one each for rotation, zoom and flip, two for the cutout


@functools.lru_cache(maxsize=2)
def uniform_numbers(seed: int, epoch: int, count: int) -> NDArray[np.float32]:
    """Return random numbers in [0, 1) for all images of an epoch, an array of shape (count, NUMBERS_PER_IMAGE).

    Row n holds the numbers of image n and does not depend on `count`.
    """
    raw = random_uint64(seed, epoch, count * NUMBERS_PER_IMAGE, "augment").reshape(count, NUMBERS_PER_IMAGE)
    return ((raw >> np.uint64(40)) / np.float64(2**24)).astype(np.float32)  # 24 bits are exact in float32


def augment(
    pixels: Tensor,
    uniform: Tensor,
    *,
    shift: int = 0,
    rotate: float = 0.0,
    zoom: float = 0.0,
    flip: float = 0.0,
    cutout: int = 0,
) -> Tensor:
    """Apply every augmentation whose argument is not 0.

    First rotate by up to `rotate` degrees and scale by a factor of up to 1 ± `zoom`, then shift by up to `shift`
    pixels, mirror with probability `flip`, and last set a square of side `cutout` to 0. `uniform` has shape
    (B, NUMBERS_PER_IMAGE).
    """
    if rotate or zoom:
        pixels = random_rotate_and_zoom(pixels, uniform[:, 2:4], rotate, zoom)
    if shift:
        pixels = random_shift(pixels, uniform[:, :2], shift)
    if flip:
        pixels = random_flip(pixels, uniform[:, 4], flip)
    if cutout:
        pixels = random_cutout(pixels, uniform[:, 5:], cutout)
    return pixels


def random_shift(pixels: Tensor, uniform: Tensor, max_pixels: int) -> Tensor:
    """Shift each image by up to `max_pixels` vertically and horizontally, and fill the gap with 0.

    `uniform` has shape (B, 2).
    """
    B, _, height, width = pixels.shape
    padded = F.pad(pixels, (max_pixels, max_pixels, max_pixels, max_pixels))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # every shift, as a view
    down, right = ((1 + 2 * max_pixels) * uniform).long().unbind(-1)
    return windows[torch.arange(B), :, 2 * max_pixels - down, 2 * max_pixels - right]


def random_rotate_and_zoom(pixels: Tensor, uniform: Tensor, degrees: float, zoom: float) -> Tensor:
    """Rotate each image by a random angle of up to ±`degrees` about its centre, and scale it by 1 − zoom to 1 + zoom.

    `uniform` has shape (B, 2).
    """
    angle, scale = (2 * uniform - 1).unbind(-1)
    angle, scale = angle * math.radians(degrees), 1 + zoom * scale
    _, _, height, width = pixels.shape
    cos, sin, zero = angle.cos() / scale, angle.sin() / scale, torch.zeros_like(angle)
    # Map output coordinates to input coordinates; both axes run from −1 to 1, even if the image is not square.
    x = torch.stack((cos, sin * height / width, zero), -1)
    y = torch.stack((-sin * width / height, cos, zero), -1)
    grid = F.affine_grid(torch.stack((x, y), 1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False)


def random_flip(pixels: Tensor, uniform: Tensor, probability: float) -> Tensor:
    """Mirror each image left to right with `probability`; `uniform` has shape (B,)."""
    return torch.where((uniform < probability)[:, None, None, None], pixels.flip(-1), pixels)


def random_cutout(pixels: Tensor, uniform: Tensor, side: int) -> Tensor:
    """Set a square of `side` × `side` pixels to 0, centred anywhere in the image (DeVries and Taylor 2017).

    The square may cross the edge of the image. `uniform` has shape (B, 2).
    """
    _, _, height, width = pixels.shape
    top, left = (uniform * torch.tensor([height, width])).long().sub(side // 2).unbind(-1)
    rows, columns = (
        (torch.arange(length) >= first[:, None]) & (torch.arange(length) < first[:, None] + side)
        for first, length in ((top, height), (left, width))
    )
    return pixels.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
