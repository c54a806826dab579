"""Draw position encodings: heat map, rotating hands, similarity by distance, mean by offset, bars of one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.plots.curves import COLORS, STYLES
from monoblock.plots.figure import create_figure

SIGNED_COLORS = "PuOr"  # orange and purple are told apart by the colour-blind
MAX_HANDS = 6  # frequencies and positions that are drawn as hands
MAX_BARS = 128  # components of a vector


def draw_vectors(vectors: Tensor, title: str, *, bar_position: int | None = None) -> Any:
    """Draw vectors (T, D) of positions in four ways: as a map, by distance from position 0, by offset, and one as bars.

    bar_position: the position whose vector is drawn as bars; None takes the middle one.
    """
    position = len(vectors) // 2 if bar_position is None else bar_position
    figure = create_figure((10.5, 7.2))
    figure.suptitle(title, fontsize=12)
    (heat, first), (mean, bars) = figure.subplots(2, 2)
    limit = float(vectors.abs().flatten().float().quantile(0.99)) or 1.0  # a few large values would hide the others
    image = heat.imshow(vectors.numpy(), aspect="auto", cmap=SIGNED_COLORS, vmin=-limit, vmax=limit)
    figure.colorbar(image, ax=heat, label="value", extend="both")
    heat.set(title="the vector of each position", xlabel="dimension", ylabel="position")
    unit = torch.nn.functional.normalize(vectors.float(), dim=-1)
    similarity = unit @ unit.mT
    first.plot(similarity[0].numpy(), color=COLORS[0])
    first.set(title="similarity to position 0", xlabel="distance", ylabel="cosine")
    offsets, means, deviations = (values.numpy() for values in mean_by_offset(similarity))
    mean.plot(offsets, means, color=COLORS[0], label="mean over all pairs")
    mean.fill_between(offsets, means - deviations, means + deviations, color=COLORS[5], alpha=0.4, label="± deviation")
    mean.set(title="mean similarity by offset", xlabel="key position − query position", ylabel="cosine")
    mean.legend(fontsize=8)
    values = vectors[position][:MAX_BARS].numpy()
    bars.bar(range(len(values)), values, color=COLORS[0], width=0.9)
    shown = "" if vectors.shape[1] <= MAX_BARS else f" (the first {MAX_BARS} of {vectors.shape[1]})"
    bars.set(title=f"the vector of position {position}", xlabel=f"dimension{shown}", ylabel="value")
    for axis in (first, mean, bars):
        axis.grid(color="#e4e4e4")
        axis.set_axisbelow(True)
    return figure


def mean_by_offset(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the offsets from -T + 1 to T - 1, and the mean and the deviation of each diagonal of a matrix (T, T)."""
    T = matrix.shape[0]
    diagonals = [matrix.diagonal(offset) for offset in range(1 - T, T)]
    means = torch.stack([diagonal.mean() for diagonal in diagonals])
    deviations = torch.stack([diagonal.std(unbiased=False) for diagonal in diagonals])
    return torch.arange(1 - T, T), means, deviations


def draw_hands(frequencies: Tensor, title: str, *, length: int) -> Any:
    """Draw pairs of dimensions as hands that turn by a fixed angle per position, fast above and slow below.

    frequencies: (pairs,) the angle per position in radians.
    """
    from matplotlib.patches import Circle

    count = min(MAX_HANDS, len(frequencies))
    pairs = torch.linspace(0, len(frequencies) - 1, count).round().long().tolist()
    positions = [*range(min(2, length)), *(2**n for n in range(1, 12) if 2**n < length)][:8]
    figure = create_figure((1.15 * len(positions) + 2.2, 1.15 * count + 0.9))
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(count, len(positions), squeeze=False)
    for row, pair in enumerate(pairs):
        for column, position in enumerate(positions):
            axis, end = axes[row][column], torch.tensor(float(frequencies[pair]) * position)
            axis.add_patch(Circle((0, 0), 1, fill=False, edgecolor="#999999"))
            axis.plot([0, float(end.cos())], [0, float(end.sin())], color=COLORS[1], linewidth=2)
            axis.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row == 0:
                axis.set_title(f"position {position}", fontsize=8)
        period = 2 * math.pi / float(frequencies[pair])
        label = f"pair {pair}: turns once\nin {period:,.{1 if period < 100 else 0}f} positions"
        axes[row][0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    return figure


def draw_bias(bias: Tensor, offsets: Sequence[int], title: str) -> Any:
    """Draw a bias (H, offsets) on attention scores by key position − query position, one line for each head."""
    figure = create_figure((7.5, 4.0))
    axis = figure.subplots()
    heads = torch.linspace(0, len(bias) - 1, min(7, len(bias))).round().long().tolist()
    for number, head in enumerate(heads):
        axis.plot(offsets, bias[head].numpy(), label=f"head {head}", color=COLORS[number], linestyle=STYLES[number])
    axis.set(xlabel="key position − query position", ylabel="added to the score")
    shown = "" if len(heads) == len(bias) else f" ({len(heads)} of {len(bias)} heads)"
    axis.set_title(f"{title}{shown}", fontsize=11)
    axis.grid(color="#e4e4e4")
    axis.legend(fontsize=8)
    return figure
