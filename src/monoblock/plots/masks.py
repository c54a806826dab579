"""Draw attention masks: any, and those of each kind of model (`monoblock demo --picture FILE`).

The latter are built from the configurations by the code that the models run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.config.families import bert, gpt, t5, vit
from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.nn.masks import Mask, TokenPositions, arange_positions, mask_from_config
from monoblock.plots.figure import create_figure, save_figure

SENTENCE = ("the", "cat", "sat", "on", "the", "mat")
TRANSLATION = (("the", "cat", "sleeps"), ("le", "chat", "dort"))
PATCHES = tuple(f"part {number}" for number in range(1, 7))
PREFIX = 3  # tokens of the sentence that are read in both directions
EMPTY, SELF, ENCODER, CROSS = "#eef0f3", "#2f6fb3", "#3f9b7a", "#e08a2e"  # colours of the cells
TEXT, QUIET = "#1c2430", "#5b6675"


def draw_masks(masks: Sequence[tuple[str, Mask]], length: int, *, note: str = "") -> Any:
    """Draw masks over `length` tokens side by side; `masks` are (title, mask) pairs, and `note` follows the legend.

    A cell is dark where a query (row) may attend to a key (column).
    """
    figure = create_figure((3.0 * len(masks) + 0.6, 4.1))
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    positions = arange_positions(length)
    for axis, (title, mask) in zip(axes, masks, strict=True):
        axis.imshow(mask.dense(positions, positions)[0, 0].numpy(), cmap="Blues", vmin=0, vmax=1.3)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("key: position attended to", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("query: position that attends", fontsize=8)
    figure.suptitle(f"dark: may attend{note}", fontsize=9)
    return figure


# -- one picture of many models ---------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One matrix; `colors` has a row for each query and a column for each key, EMPTY where attention is masked."""

    title: str
    code: str
    caption: str
    tokens: Sequence[str]
    colors: list[list[str]]


def save_overview(path: Path, *, narrow: bool = False) -> Path:
    """Draw the attention masks of four families of models and of two variants of a decoder.

    narrow: in two columns instead of three, for small screens (docs/pictures/overview-narrow.png).
    """
    figure = create_figure((5.3, 10.2) if narrow else (10.2, 7.6))
    figure.patch.set_facecolor("white")
    title = f"One block, many models:{chr(10) if narrow else ' '}which tokens a token attends to"
    figure.suptitle(title, fontsize=15, fontweight="bold", color=TEXT)
    legend = "A row is a token. Its coloured cells are the tokens that it attends to; grey cells are masked."
    figure.supxlabel(textwrap.fill(legend, 60) if narrow else legend, fontsize=10.5, color=TEXT)
    figure.get_layout_engine().set(w_pad=0.02 if narrow else 0.16, h_pad=0.1)
    axes = figure.subplots(3, 2) if narrow else figure.subplots(2, 3)
    for axis, panel in zip(axes.flat, _panels(), strict=True):
        _draw(axis, panel._replace(caption=textwrap.fill(panel.caption, 30)) if narrow else panel)
    save_figure(figure, path)
    if path.suffix.lower() == ".png":
        from PIL import Image  # matplotlib depends on it

        with Image.open(path) as image:
            reduced = image.convert("RGB").quantize(48)
        reduced.save(path, optimize=True)  # with a palette, a third as large
    return path


def _panels() -> list[Panel]:
    decoder = gpt(vocab=9, width=8, depth=1, heads=1, context=9)
    both = t5(vocab=9, width=8, depth=1, heads=1)
    encoder = _colors(bert(vocab=9, width=8, depth=1, heads=1, context=9), "encoder", ENCODER)
    vision = _colors(vit(image=12, patch=4, width=8, depth=1, heads=1, classes=2), "encoder", ENCODER)
    first_tokens = torch.arange(len(SENTENCE))[None] < PREFIX
    prefix = _colors(vary(decoder, mask="prefix"), "decoder", SELF, prefix=first_tokens)
    source, target = map(len, TRANSLATION)
    cross = [[CROSS] * source] * target  # the masks of the encoder, of cross-attention and of the decoder in one matrix
    matrix = [row + [EMPTY] * target for row in _colors(both, "encoder", ENCODER, source)]
    matrix += [left + right for left, right in zip(cross, _colors(both, "decoder", SELF, target), strict=True)]
    pair = [word for side in TRANSLATION for word in side]
    past = "itself and the tokens before it:\nto predict the next token"
    sides = "the source attends to itself (green), the target\nto the source (orange) and to its past (blue)"
    near = "itself and the 2 tokens before it:\na small cache, however long the text"
    prompt = "the prompt (first 3 tokens) in both directions,\nthe answer from left to right"
    causal, window = _colors(decoder, "decoder", SELF), _colors(vary(decoder, window=3), "decoder", SELF)
    return [
        Panel("Decoder", "mb.gpt(…)   mb.llama(…)", past, SENTENCE, causal),
        Panel("Encoder", "mb.bert(…)", "all tokens:\nto label, fill or embed a text", SENTENCE, encoder),
        Panel("Encoder-decoder", "mb.t5(…)   mb.bart(…)", sides, pair, matrix),
        Panel("Decoder with a window", "mb.vary(config, window=3)", near, SENTENCE, window),
        Panel("Decoder with a prefix", 'mb.vary(config, mask="prefix")', prompt, SENTENCE, prefix),
        Panel("Vision", "mb.vit(…)", "all parts (patches) of an image:\nto classify it", PATCHES, vision),
    ]


def _colors(
    config: ModelConfig, stack: str, color: str, length: int = len(SENTENCE), prefix: Tensor | None = None
) -> list[list[str]]:
    """Return the mask of the self-attention of a stack in a color."""
    positions = arange_positions(length)
    if prefix is not None:
        positions = TokenPositions(positions.positions, prefix_or_global=prefix)
    mask = mask_from_config(next(iter(config.stacks[stack].layers())).attention)
    visible = mask.dense(positions, positions)[0, 0].tolist()
    return [[color if cell else EMPTY for cell in row] for row in visible]


def _draw(axis: Any, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    size = len(panel.tokens)
    for row, colors in enumerate(panel.colors):
        for column, color in enumerate(colors):
            axis.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, facecolor=color, linewidth=0))
    axis.set(xlim=(0, size), ylim=(size, 0), aspect="equal")
    centres = [index + 0.5 for index in range(size)]
    axis.set_yticks(centres, panel.tokens, fontsize=10, color=TEXT)
    axis.set_xticks(centres, panel.tokens, fontsize=10, color=TEXT, rotation=45, ha="left", rotation_mode="anchor")
    axis.xaxis.tick_top()
    axis.tick_params(length=0, pad=2)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xlabel(panel.caption, fontsize=10, color=TEXT, labelpad=6)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    axis.annotate(panel.title, (0.5, 1), xytext=(0, 58), fontsize=13, fontweight="bold", color=TEXT, **place)
    axis.annotate(panel.code, (0.5, 1), xytext=(0, 44), fontsize=9.5, family="monospace", color=QUIET, **place)
