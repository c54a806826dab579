"""Training images varied a little: shifted, turned, zoomed, flipped, with a square cut out.

Each is a function of a batch of pixels (B, channels, height, width) and of chances (B, n) in [0, 1), a row an image, so
a whole batch is varied at once.  The chances are a pure function of (seed, epoch, sample): who makes the batch, on how
many ranks, after which interruption, changes nothing.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from monoblock.data.order import draws

EACH = 7  # chances of an image: two of a shift, a turn, a zoom, a flip, two of a cutout


@functools.lru_cache(maxsize=2)
def chances(seed: int, epoch: int, count: int) -> NDArray[np.float32]:
    """(count, EACH) numbers in [0, 1): row n is sample n's, however many others there are."""
    raw = draws(seed, epoch, count * EACH, "augment").reshape(count, EACH)
    return ((raw >> np.uint64(40)) / np.float64(2**24)).astype(np.float32)  # 24 bits, which a float32 holds exactly


def augment(
    pixels: Tensor,
    chance: Tensor,
    *,
    shift: int = 0,
    turn: float = 0.0,
    zoom: float = 0.0,
    flip: float = 0.0,
    cutout: int = 0,
) -> Tensor:
    """All that is asked for, in the order of a camera: turned and zoomed, shifted, flipped, covered."""
    if turn or zoom:
        pixels = turned(pixels, chance[:, 2:4], turn, zoom)
    if shift:
        pixels = shifted(pixels, chance[:, :2], shift)
    if flip:
        pixels = flipped(pixels, chance[:, 4], flip)
    if cutout:
        pixels = covered(pixels, chance[:, 5:], cutout)
    return pixels


def shifted(pixels: Tensor, chance: Tensor, most: int) -> Tensor:
    """Moved by −most … most pixels down and right, all equally likely; what comes in is 0."""
    B, _, height, width = pixels.shape
    windows = F.pad(pixels, (most, most, most, most)).unfold(2, height, 1).unfold(3, width, 1)  # all that could be
    down, right = ((1 + 2 * most) * chance).long().unbind(-1)
    return windows[torch.arange(B), :, 2 * most - down, 2 * most - right]


def turned(pixels: Tensor, chance: Tensor, degrees: float, zoom: float) -> Tensor:
    """Turned about the middle by −degrees … degrees and made 1 − zoom … 1 + zoom times as large; bilinear."""
    angle, size = (2 * chance - 1).unbind(-1)
    angle, size = angle * math.radians(degrees), 1 + zoom * size
    _, _, height, width = pixels.shape
    cos, sin, none = angle.cos() / size, angle.sin() / size, torch.zeros_like(angle)
    # For each pixel of the result, where it comes from; both axes run from −1 to 1, whatever the shape.
    across = torch.stack((cos, sin * height / width, none), -1)
    down = torch.stack((-sin * width / height, cos, none), -1)
    grid = F.affine_grid(torch.stack((across, down), 1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False)


def flipped(pixels: Tensor, chance: Tensor, share: float) -> Tensor:
    """That share of the images seen in a mirror."""
    return torch.where((chance < share)[:, None, None, None], pixels.flip(-1), pixels)


def covered(pixels: Tensor, chance: Tensor, side: int) -> Tensor:
    """A square set to 0, its middle anywhere in the image, so that it may hang over the edge (DeVries, Taylor 2017)."""
    _, _, height, width = pixels.shape
    top, left = (chance * torch.tensor([height, width])).long().sub(side // 2).unbind(-1)
    inside = [
        (torch.arange(length) >= first[:, None]) & (torch.arange(length) < first[:, None] + side)
        for first, length in ((top, height), (left, width))
    ]
    return pixels.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)
