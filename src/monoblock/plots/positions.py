"""Draw sinusoidal positions."""

from __future__ import annotations

from pathlib import Path

import torch

from monoblock.config.model import Sinusoid
from monoblock.nn.positions import sinusoid
from monoblock.plots.figure import create_figure, save_figure


def save_positions(length: int, width: int, path: Path) -> Path:
    """Draw sinusoidal positions (Vaswani et al. 2017), and the cosine similarity of two positions by their distance."""
    encoding = sinusoid(torch.arange(length), width, Sinusoid())
    similarity = torch.nn.functional.cosine_similarity(encoding[:1], encoding, dim=-1)
    figure = create_figure((9.0, 3.6))
    left, right = figure.subplots(1, 2)
    image = left.imshow(encoding, aspect="auto", cmap="RdBu")
    figure.colorbar(image, ax=left)
    left.set(title="sinusoidal positions", xlabel="dimension", ylabel="position")
    right.plot(similarity)
    right.set(title="similarity of two positions", xlabel="distance", ylabel="cosine")
    return save_figure(figure, path)
