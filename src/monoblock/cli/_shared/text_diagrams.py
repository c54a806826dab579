"""Masks and positional encodings as lines of text for a terminal."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.config.model import Sinusoid
from monoblock.nn.masks import Mask
from monoblock.nn.positions import sinusoid
from monoblock.nn.token_positions import arange_positions

SHADES = " ░▒▓█"


def mask_text(mask: Mask, length: int) -> list[str]:
    """Draw one line for each query, with a full square for every key it may attend to."""
    allowed = mask.dense(arange_positions(length), arange_positions(length))[0, 0]
    return ["".join("██" if visible else "··" for visible in row) for row in allowed.tolist()]


def shade_matrix(matrix: Tensor) -> list[str]:
    """Draw a matrix as lines of text, with a blank for the lowest value and a full square for the highest."""
    low, high = matrix.min(), matrix.max()
    levels = ((matrix - low) / (high - low).clamp(min=1e-9) * (len(SHADES) - 1)).round().long()
    return ["".join(SHADES[level] for level in row) for row in levels.tolist()]


def positions_text(length: int, width: int) -> list[str]:
    """Draw the sinusoids of Vaswani et al. 2017, one line for each position: sines, fastest first, then cosines."""
    return shade_matrix(sinusoid(torch.arange(length), width, Sinusoid(form="halves")))
