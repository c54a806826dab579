"""Draw the architecture of a configuration, like figure 1 of Vaswani et al. 2017 (`mb.draw` is in runs/draw.py).

Left the whole model, from the ids at the bottom to the logits at the top, with a frame around the blocks that are
repeated; right what happens inside attention and the feed-forward network. Everything is read from the configuration:
where norms stand, parallel branches, experts, positions, windows, shapes. The parameters written into the boxes, times
the layers of their frame, add up to those of the model.
"""

from __future__ import annotations

import html
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.accounting.parameters import block_parameters, count_blocks, count_parameters, norm_parameters
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    FramesConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
    Rotary,
    StackConfig,
)
from monoblock.config.parts import ACTIVATION_ROWS, SEQUENCE_HEADS, VOCABULARY_HEADS
from monoblock.errors import ConfigError, InputError
from monoblock.metrics.numbers import format_count
from monoblock.nn.arguments import describe
from monoblock.untrusted_files import write_atomically

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer

FILL = {
    "embedding": "#f8dcd6",
    "attention": "#fbe3c0",
    "feedforward": "#cfe3f5",
    "norm": "#f3f1bd",
    "head": "#d9ead3",
    "step": "#f2f2f4",
}
LINE, TEXT, QUIET, FRAME = "#30343b", "#16191d", "#646b75", "#fafafa"
WIDE, HALF, NARROW = 216, 176, 96  # widths of a box in a column, of one of two branches, of one of three
BETWEEN = 70  # of two frames
GAP, BEND, TITLE, DETAIL = 15, 20, 15, 13  # length of an arrow, distance of a residual line, heights of lines of text


@dataclass(frozen=True)
class Drawing:
    """A picture as SVG; notebooks show it, and `save` writes it to a file."""

    svg: str
    parameters: int  # the sum of the parameters in the boxes, each as often as it is repeated

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file that ends in .svg, and return its path."""
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise InputError(f"pictures of an architecture are SVG; write {path.with_suffix('.svg')}, not {path}")
        write_atomically(path, self.svg)
        return path

    def _repr_svg_(self) -> str:
        return self.svg


def draw(what: ModelConfig | RecurrentConfig | Transformer, *, name: str | None = None) -> Drawing:
    """Draw the architecture of a configuration or of a model.

    name: the title; by default the family, as in "decoder-only Transformer".
    """
    config: Any = getattr(what, "config", what)
    if not isinstance(config, ModelConfig):
        instead = "model.to_monoblock()" if hasattr(what, "to_monoblock") else "a ModelConfig or the name of a preset"
        raise ConfigError(f"only Transformers are drawn, but got {describe(what)}; give {instead}")
    counts = count_parameters(config)
    picture = _Picture()
    columns: dict[str, _Column] = {}
    x = 0.0
    for stack_name, stack in config.stacks.items():
        half = _frame_width(stack) / 2
        side = -1 if stack_name == "encoder" else 1  # residual lines bend away from the other column
        x += half
        column = columns[stack_name] = _Column(picture, x, side)
        _draw_input(column, config, stack_name, counts)
        _draw_stack(column, stack, counts.get(f"{stack_name}.attention.positions", 0), columns.get("encoder"))
        x += half + BETWEEN
    _draw_head(column, config, counts)
    stack = next(iter(config.stacks.values()))
    block, where = next(stack.layers()), "" if len(count_blocks(stack)) == 1 else " of layer 0"
    x = picture.right + 40 + 1.5 * NARROW + 14
    top = _draw_attention_steps(picture, x, block, where)
    if block.feedforward.hidden:
        _draw_feedforward_steps(picture, x, top - 70, block, where)
    title = name or f"{config.family} Transformer"
    shapes = "shapes: B rows, T tokens, S tokens that are attended to"
    family = "" if title.startswith(config.family) else f"{config.family}, "
    subtitle = f"{family}{sum(counts.values()):,} parameters{_not_drawn(what, config, counts)} · {shapes}"
    return Drawing(picture.render(title, subtitle), picture.parameters)


def _not_drawn(what: Any, config: ModelConfig, counts: dict[str, int]) -> str:
    """Say how many parameters a model has that its configuration does not describe, such as those of a subclass."""
    if what is config or config.quantize is not None:  # matrices are packed
        return ""
    more = sum(weight.numel() for weight in what.parameters()) - sum(counts.values())
    words = "more in modules that are not drawn" if more > 0 else "fewer in the modules of this model"
    return f", {abs(more):,} {words}" if more else ""


# -- what is drawn on ------------------------------------------------------------------------------------------------


class _Picture:
    """Pieces of SVG and the area that they cover; y is 0 at the bottom and negative above it, as SVG counts."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.left = self.right = self.top = self.bottom = 0.0
        self.parameters = 0

    def cover(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.left, self.right = min(self.left, x0), max(self.right, x1)
        self.top, self.bottom = min(self.top, y0), max(self.bottom, y1)

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """Draw a line through points, with an arrow at its end."""
        for x, y in points:
            self.cover(x - 4, y - 4, x + 4, y + 4)
        path = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.pieces.append(f'<path d="M {path}"{" marker-end=" + chr(34) + "url(#tip)" + chr(34) if arrow else ""}/>')

    def text(self, x: float, y: float, words: str, style: str = "detail", anchor: str = "middle") -> None:
        reach = len(words) * (8.0 if style == "title" else 6.2)
        start = {"middle": x - reach / 2, "start": x, "end": x - reach}[anchor]
        self.cover(start, y - 12, start + reach, y + 4)
        self.pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{html.escape(words)}</text>'
        )

    def rectangle(self, x: float, top: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle centred at x."""
        self.cover(x - width / 2, top, x + width / 2, top + height)
        self.pieces.append(
            f'<rect x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" '
            f'fill="{FILL[kind]}"/>'
        )

    def circle(self, x: float, y: float, sign: str) -> None:
        """Draw a sum, a product or a position that is added."""
        self.pieces.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="#fff"/>')
        strokes = {"+": "M -5 0 H 5 M 0 -5 V 5", "×": "M -4 -4 L 4 4 M -4 4 L 4 -4"}[sign]
        self.pieces.append(f'<path transform="translate({x:.1f} {y:.1f})" d="{strokes}"/>')

    def render(self, title: str, subtitle: str) -> str:
        """Return the whole picture as SVG, with its title above it."""
        left, top = self.left - 24, self.top - 74
        width = max(self.right, left + 6.2 * len(subtitle), left + 12 * len(title)) + 24 - left
        height = self.bottom + 20 - top
        style = (
            f"rect,circle{{stroke:{LINE};stroke-width:1}}path{{stroke:{LINE};stroke-width:1.3;fill:none}}"
            f"text{{font-family:Helvetica,Arial,sans-serif;fill:{TEXT}}}.heading{{font-size:19px;font-weight:bold}}"
            f".title{{font-size:13px;font-weight:bold}}.detail{{font-size:11px}}.count{{font-size:11px;fill:{QUIET}}}"
            f".frame{{fill:{FRAME};stroke:#9aa1ab;stroke-dasharray:none}}.note{{font-size:12px;fill:{QUIET}}}"
        )
        heading = (
            f'<text x="{left + 24:.1f}" y="{top + 32:.1f}" class="heading">{html.escape(title)}</text>'
            f'<text x="{left + 24:.1f}" y="{top + 52:.1f}" class="note">{html.escape(subtitle)}</text>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(f"{title}: {subtitle}")}" '
            f'viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
            f'<style>{style}</style><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" style="fill:{LINE};stroke:none"/></marker>'
            f'</defs><rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" '
            f'style="fill:#fff;stroke:none"/>{heading}{"".join(self.pieces)}</svg>\n'
        )


class _Column:
    """A place at x that grows upwards; `y` is where the next piece begins."""

    def __init__(self, picture: _Picture, x: float, side: int = 1, y: float = 0.0) -> None:
        self.picture, self.x, self.side, self.y = picture, x, side, y

    def arrow(self, length: float = GAP, tip: bool = True) -> None:
        self.picture.line((self.x, self.y), (self.x, self.y - length), arrow=tip)
        self.y -= length

    def box(
        self,
        kind: str,
        title: str,
        *lines: str,
        parameters: int = 0,
        times: int = 1,
        width: float = WIDE,
        arrow: bool = True,
    ) -> None:
        """Draw an arrow and a box with a title, its parameters and lines of details; `times` layers have them."""
        if arrow:
            self.arrow()
        self.picture.parameters += parameters * times
        count = f"{format_count(parameters)} parameters" if parameters else ""
        rows = [*lines, count] if count else list(lines)
        height = 9 + TITLE + DETAIL * len(rows)
        self.y -= height
        self.picture.rectangle(self.x, self.y, width, height, kind)
        self.picture.text(self.x, self.y + 17, title, "title")
        for number, row in enumerate(rows):
            style = "count" if row is count else "detail"
            self.picture.text(self.x, self.y + 17 + DETAIL * (number + 1), row, style)

    def sum(self, sign: str = "+", arrow: bool = True) -> float:
        """Draw a circled sign, by default with an arrow to it, and return the height of its centre."""
        if arrow:
            self.arrow(GAP - 3)
        self.y -= 9
        self.picture.circle(self.x, self.y, sign)
        self.y -= 9
        return self.y + 9

    def norm(self, norm: NormConfig | None, size: int, times: int = 1, width: float = WIDE) -> None:
        """Draw an arrow and a norm, unless there is none."""
        if norm is not None and norm.kind != "none":
            count = norm_parameters(norm, size)
            self.box("norm", norm.row.label, parameters=count, times=times, width=width)


# -- the model -------------------------------------------------------------------------------------------------------


def _draw_input(column: _Column, config: ModelConfig, stack_name: str, counts: dict[str, int]) -> None:
    """Draw what a stack reads: ids or pixels, their embedding, positions and the norm."""
    is_target = stack_name == "decoder" and config.family == "encoder-decoder"
    prefix = "target" if is_target and config.target is not None else "input"
    given, picture = config.inputs[prefix], column.picture
    is_shared = is_target and prefix == "input"  # the source and the target have one embedding, counted once
    count = {} if is_shared else {key.partition(".")[2]: n for key, n in counts.items() if key.startswith(f"{prefix}.")}
    width = config.width
    ids = "ids (B, T)"
    if config.family == "encoder-decoder":
        ids = "target ids (B, T)" if is_target else "source ids (B, S)"
    if isinstance(given, PatchConfig):
        picture.text(column.x, column.y - 3, f"pixels (B, {given.channels}, {given.image}, {given.image})")
        tokens = [name.replace("_", " ") for name in ("class_token", "distillation_token") if getattr(given, name)]
        tokens += [f"{given.registers} registers"] if given.registers else []
        lines = [f"{given.patch} × {given.patch} × {given.channels} pixels → {width:,}"]
        lines += [f"with {' and '.join(tokens)}"] if tokens else []
        title, size = "patches", width
    elif isinstance(given, FramesConfig):
        picture.text(column.x, column.y - 3, f"frames (B, time, {given.channels})")
        title, size = "two convolutions", width
        lines = [f"3 × {given.channels} → {width:,}, GELU", f"3 × {width:,} → {width:,}, GELU"]
        lines.append("the second: every other frame")
    else:
        picture.text(column.x, column.y - 3, ids)
        size = given.dim or width
        scale = f" · √{width:,}" if given.scale == "sqrt_width" else f" · {given.scale:g}" if given.scale != 1 else ""
        title, lines = "token embedding", [f"{given.vocab:,} × {size:,}{scale}"]
        if is_shared or (is_target and config.tie in ("source_target", "three_way")):
            lines.append("that of the source")
    column.y -= 16
    column.box("embedding", title, *lines, parameters=sum(n for key, n in count.items() if key in EMBEDDED))
    if isinstance(given, EmbeddingConfig) and given.segments:
        _draw_added(column, f"{given.segments} segments", count.get("segment", 0))
    if given.positions is not None:
        context = given.context if isinstance(given.positions, Learned) else None
        _draw_added(column, given.positions.label, count.get("position", 0), context)
    projected = size if not isinstance(given, EmbeddingConfig) or given.projection == "last" else width
    if count or given.norm is not None:
        column.norm(given.norm, projected, times=0 if is_shared else 1)
    if size != width:
        column.box("embedding", "projection", f"{size:,} → {width:,}", parameters=count.get("projection", 0))


EMBEDDED = ("token", "patch", "class_token", "distillation_token", "mask_token", "registers", "first", "second")


def _draw_added(column: _Column, words: str, parameters: int, context: int | None = None) -> None:
    """Draw a vector that is added to the embedding, on the side of the residual lines."""
    picture, count = column.picture, f"{format_count(parameters)} parameters"
    picture.parameters += parameters
    column.arrow(8, tip=False)
    y, x = column.sum(), column.x + column.side * 42
    picture.line((x, y), (column.x + column.side * 10, y))
    anchor = "start" if column.side > 0 else "end"
    rows = [f"{words}, up to {context:,}" if context else words, *([count] if parameters else [])]
    for number, row in enumerate(rows):
        height = y + 4 + DETAIL * (number - (len(rows) - 1) / 2)
        picture.text(x + column.side * 4, height, row, "count" if row == count else "detail", anchor)


def _frame_width(stack: StackConfig) -> float:
    return (2 * HALF + 24 if any(block.is_parallel for block in count_blocks(stack)) else WIDE) + 2 * BEND + 36


def _draw_stack(column: _Column, stack: StackConfig, table: int, encoder: _Column | None) -> None:
    """Draw a frame for each kind of block, one more around those that alternate, and the norm after the last."""
    layers, owns = list(stack.layers()), [owned for _, owned in stack.layers_with_ownership()]
    kinds, width = _kinds_of_layers(stack), _frame_width(stack)
    start = 0
    for period, times in _find_repeats(kinds):
        column.arrow()
        bottom, place, end = column.y, len(column.picture.pieces), start + period * times
        notes = ["one set of weights"] if not all(owns[start:end]) else []
        if table:
            notes += ["one table of positions", f"for all: {format_count(table)}"]
            column.picture.parameters, table = column.picture.parameters + table, 0
        if period > 1:
            column.y -= 8
        for number, kind in enumerate(dict.fromkeys(kinds[start : start + period])):
            mine = [index for index in range(start, end) if kinds[index] == kind]
            if number:
                column.arrow()
            inner, inside = column.y, len(column.picture.pieces)
            column.y -= 8
            lines = _attention_lines([layers[index].attention for index in mine])
            _draw_block(column, layers[mine[0]], lines, sum(owns[index] for index in mine), encoder)
            column.y -= 10
            names = [] if len(mine) == len(kinds) else [_name_layers(mine)]
            count = len(mine) if period == 1 else len(mine) // times
            title = f"× {count}" if period == 1 or count > 1 else ""
            _frame(column, inside, inner, width, title, names + notes * (period == 1), 8 if period == 1 else 18)
        if period > 1:
            column.y -= 10
            _frame(column, place, bottom, width + 20, f"× {times}", notes)
        start = end
    column.norm(stack.norm, stack.width)


def _frame(
    column: _Column, place: int, bottom: float, width: float, title: str, notes: list[str], gap: float = 8
) -> None:
    """Draw a frame from `bottom` to the end of a column, behind the pieces from `place` on, with notes beside it."""
    picture, top = column.picture, column.y
    frame = (
        f'<rect x="{column.x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{bottom - top:.1f}" rx="10" class="frame"/>'
    )
    picture.pieces.insert(place, frame)
    picture.pieces.append(f'<path d="M {column.x} {bottom} V {bottom - 8}"/>')
    picture.cover(column.x - width / 2, top, column.x + width / 2, bottom)
    x, middle = column.x + column.side * (width / 2 + gap), (bottom + top) / 2
    anchor = "start" if column.side > 0 else "end"
    if title:
        picture.text(x, middle, title, "title", anchor)
    for number, note in enumerate(notes):
        picture.text(x, middle + 15 + DETAIL * number, note, "count", anchor)


def _kinds_of_layers(stack: StackConfig) -> list[int]:
    """Return a number for each layer, equal for blocks of one kind, which differ at most in what a query may see."""
    kinds: dict[BlockConfig, int] = {}
    for block in count_blocks(stack):
        seen: dict[str, Any] = {"window": None, "global_tokens": False, "random_blocks": 0, "random_seed": 0}
        plain = replace(block.attention, positions=None, scale=None, **seen)
        kinds[block] = kinds.setdefault(replace(block, attention=plain), len(kinds))
    runs = [([kinds[block] for block in run.blocks], run.times) for run in stack.pattern]
    return [kind for numbers, times in runs for kind in numbers * times]


MAX_PERIOD = 12  # layers after which kinds of blocks are found to repeat


def _find_repeats(kinds: list[int]) -> list[tuple[int, int]]:
    """Return (period, times) of runs in which each kind stands in one row: [0, 1, 2, 1, 2] is [(1, 1), (2, 2)]."""
    found, start = [], 0
    while start < len(kinds):
        best = (1, 1)
        for period in range(1, MAX_PERIOD + 1):
            first, times = kinds[start : start + period], 1
            while kinds[start + times * period : start + (times + 1) * period] == first:
                times += 1
            rows = 1 + sum(one != other for one, other in itertools.pairwise(first))
            if (times > 1 or period == 1) and rows == len(set(first)) and period * times > best[0] * best[1]:
                best = (period, times)
        found.append(best)
        start += best[0] * best[1]
    return found


def _name_layers(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    some = ", ".join(map(str, layers)) if len(layers) <= 4 else f"{layers[0]}, {layers[1]}, … {layers[-1]}"
    return f"layers {some}"


def _draw_block(
    column: _Column, block: BlockConfig, attention_lines: list[str], owned: int, encoder: _Column | None
) -> None:
    """Draw the sublayers of a block with their norms and residual connections."""
    counts = block_parameters(block)
    gain = block.width if block.layer_scale is not None else 0
    last = [f"times {block.residual_scale:g}"] if block.residual_scale != 1 else []
    last += ["times a gain"] if gain else []

    def box(into: _Column, name: str, width: float = WIDE) -> None:
        count = gain + sum(n for key, n in counts.items() if key.partition(".")[0] == name)
        if name == "feedforward":
            lines = _feedforward_lines(block.feedforward, block.width)
            title = "mixture of experts" if block.feedforward.experts else "feed-forward"
        else:
            attention = block.cross if name == "cross" and block.cross else block.attention
            lines = attention_lines if name == "attention" else _attention_lines([attention])
            title = _attention_title(attention, name)
        kind = "feedforward" if name == "feedforward" else "attention"
        into.box(kind, title, *lines, *last, parameters=count, times=owned, width=width)

    if block.is_parallel:
        _draw_parallel(column, block, owned, box)
        return
    for name in block.sublayers:
        split = column.y
        has_norm = name != "attention" or block.attention_norm
        if block.norm_place in ("pre", "sandwich") and has_norm:
            column.norm(block.norm, block.width, owned)
        box(column, name)
        if name == "cross" and encoder is not None:
            _draw_memory(column, encoder)
        if block.norm_place in ("output", "sandwich"):
            column.norm(block.norm, block.width, owned)
        if block.residual != "none":
            _draw_residual(column, split, WIDE / 2 + BEND)
        if block.norm_place == "post":
            column.norm(block.norm, block.width, owned)


def _draw_residual(column: _Column, split: float, reach: float) -> None:
    """Draw the line around a sublayer and the sum that it leads to."""
    y, x = column.sum(), column.x + column.side * reach
    column.picture.line((column.x, split - 4), (x, split - 4), (x, y), (column.x + column.side * 10, y))


def _draw_memory(column: _Column, encoder: _Column) -> None:
    """Draw the line from the top of the encoder to the box of the cross-attention that was just drawn."""
    picture, x = column.picture, column.x - WIDE / 2 - BEND - 18 - BETWEEN / 2
    middle = column.y + 24
    top = encoder.y - 14
    picture.line((encoder.x, encoder.y), (encoder.x, top), (x, top), (x, middle), (column.x - WIDE / 2, middle))


def _draw_parallel(column: _Column, block: BlockConfig, owned: int, box: Any) -> None:
    """Draw attention and feed-forward side by side: both read the same input, and both outputs are added to it."""
    picture, split, offset = column.picture, column.y, HALF / 2 + 8
    if block.residual == "parallel_shared":
        column.norm(block.norm, block.width, owned)
    branches = [_Column(picture, column.x + place, column.side, column.y - 10) for place in (-offset, offset)]
    for name, branch in zip(("attention", "feedforward"), branches, strict=True):
        picture.line((column.x, column.y), (column.x, branch.y), (branch.x, branch.y), arrow=False)
        if block.residual == "parallel" and (name != "attention" or block.attention_norm):
            branch.norm(block.norm, block.width, owned, HALF)
        box(branch, name, HALF)
    column.y = min(branch.y for branch in branches) - 8
    y = column.sum(arrow=False)
    for branch in branches:
        side = -1 if branch.x < column.x else 1
        picture.line((branch.x, branch.y), (branch.x, y), (column.x + side * 10, y))
    _draw_residual(column, split, HALF + 8 + BEND)


def _attention_title(attention: AttentionConfig, name: str) -> str:
    if name == "cross":
        return "cross-attention"
    kind = "linear attention" if attention.kind == "linear" else "self-attention"
    return {"causal": "masked ", "prefix": "prefix ", "full": ""}[attention.mask] + kind


def _attention_lines(attentions: list[AttentionConfig]) -> list[str]:
    """Describe the attention of one kind of layer; what only some of them have says how many."""
    lines: Counter[str] = Counter()
    for attention in attentions:
        groups = attention.num_kv_heads
        heads = "1 head" if attention.heads == 1 else f"{attention.heads} heads"
        shared = "" if groups == attention.heads else f", {groups} for keys and values"
        lines[f"{heads}{shared}"] += 1
        lines[attention.positions.label if attention.positions else ""] += attention.positions is not None
        lines[_window_line(attention)] += attention.window is not None
        lines["queries and keys normalized"] += attention.qk_norm is not None
        lines["a learned sink for each head"] += attention.sinks
        lines[f"q, k, v clamped to ±{attention.clip:g}" if attention.clip else ""] += bool(attention.clip)
    total = len(attentions)
    return [line if n == total else f"{line} ({n} of {total})" for line, n in lines.items() if n]


def _window_line(attention: AttentionConfig) -> str:
    if attention.window is None:
        return ""
    beyond = [" + global tokens"] if attention.global_tokens else []
    beyond += [f" + {attention.random_blocks} random blocks"] if attention.random_blocks else []
    is_full = attention.mask == "full"
    size = f"window: {attention.window - 1:,} to each side" if is_full else f"window of {attention.window:,}"
    return f"{size}{''.join(beyond)}"


def _feedforward_lines(feedforward: FeedForwardConfig, width: int) -> list[str]:
    gate = "gated " if feedforward.gated else ""
    lines = [
        f"{width:,} → {feedforward.hidden:,} → {width:,}",
        f"{gate}{ACTIVATION_ROWS[feedforward.activation].label}",
    ]
    if feedforward.clamp is not None:
        lines.append(f"gate and up clamped to {feedforward.clamp:g}")
    if feedforward.experts is not None:
        lines.insert(0, f"{feedforward.experts.top_k} of {feedforward.experts.count} experts for each token")
    return lines


def _draw_head(column: _Column, config: ModelConfig, counts: dict[str, int]) -> None:
    """Draw the layers after the last stack, and what the model returns."""
    head, picture, width = config.head, column.picture, config.width
    names = {key.partition(".")[2]: n for key, n in counts.items() if key.startswith("head.")}
    shape = f"hidden states (B, T, {width:,})"
    if head is not None:
        given = config.target_input
        vocab = given.vocab if isinstance(given, EmbeddingConfig) else 0
        outputs = {"spans": 2, "pooled": head.project or width}.get(head.kind, head.classes or 0)
        outputs = vocab if head.kind in VOCABULARY_HEADS else outputs
        tied = config.tie in ("output", "three_way")
        pooled = f"{head.pooling} token" if head.pooling != "mean" else "mean of the tokens"
        lines = ["mean of two: of the class token", "and of the distillation token"] if head.teacher else [pooled]
        lines *= head.kind in SEQUENCE_HEADS
        lines += [f"dense, {head.pooler}"] if head.pooler != "none" else []
        lines += [f"dense, {ACTIVATION_ROWS[head.transform].label}, norm"] if head.transform else []
        if head.kind != "pooled" or head.project:
            lines.append(f"→ {outputs:,}" + (", the embedding's matrix" if tied else ""))
        scale = f"1/√{width:,}" if head.scale == "inverse_sqrt_width" else f"{head.scale:g}"
        lines += [f"times {scale}"] if head.scale != 1.0 else []
        lines += [f"soft cap {head.softcap:g}"] if head.softcap else []
        column.box("head", HEAD_TITLES[head.kind], *lines, parameters=sum(names.values()))
        is_row = head.kind in SEQUENCE_HEADS
        what = "vectors" if head.kind == "pooled" else "numbers" if head.kind == "regression" else "logits"
        shape = f"{what} (B, {outputs:,})" if is_row else f"{what} (B, T, {outputs:,})"
    column.arrow()
    column.y -= 6
    picture.text(column.x, column.y, shape)


HEAD_TITLES = {
    "language_model": "output",
    "masked_lm": "masked language model",
    "classifier": "classifier",
    "regression": "regression",
    "tagger": "tagger",
    "spans": "answer spans",
    "pooled": "pooled vector",
}


# -- inside attention and the feed-forward network -------------------------------------------------------------------


def _draw_attention_steps(picture: _Picture, x: float, block: BlockConfig, where: str) -> float:
    """Draw attention from x to its output, and return how high it reaches."""
    attention, width = block.attention, block.width
    size, value_size = attention.key_size(width), attention.value_size(width)
    groups = attention.num_kv_heads
    shapes = [
        ("query", f"{attention.heads} × {size}", attention.qk_norm, attention.positions),
        ("key", f"{groups} × {size}", attention.qk_norm, attention.positions),
        ("value", f"{groups} × {value_size}", None, None),
    ]
    start = _Column(picture, x)
    picture.text(x, -3, f"x (B, T, {width:,})")
    start.y = -16
    tops = []
    for place, (name, shape, norm, positions) in zip((-1, 0, 1), shapes, strict=True):
        branch = _Column(picture, x + place * (NARROW + 14), y=-26)
        picture.line((x, -16), (x, -26), (branch.x, -26), arrow=False)
        clip = [f"clamped to ±{attention.clip:g}"] if attention.clip else []
        branch.box("attention", name, f"{width:,} →", shape, *clip, width=NARROW)
        branch.norm(norm, 0, 0, NARROW)
        if isinstance(positions, Rotary):
            branch.box("step", "rotate", "by position", width=NARROW)
        tops.append(branch)
    above = min(branch.y for branch in tops) - GAP
    column = _Column(picture, x - (NARROW + 14) / 2, y=above)
    for branch in tops[:2]:
        picture.line((branch.x, branch.y), (branch.x, above))
    pair, inner = 2 * NARROW + 14, "φ(q) · φ(k)ᵀ" if attention.kind == "linear" else "q · kᵀ"
    if attention.kind == "linear":
        column.box("step", inner, "sums over the keys seen", width=pair, arrow=False)
    else:
        scale = size**-0.5 if attention.scale is None else attention.scale
        factor = f" / √{size}" if math.isclose(scale, size**-0.5) else f" × {scale:.4g}" if scale != 1 else ""
        scores = f"scores (B, {attention.heads}, T, S)"
        column.box("step", f"{inner}{factor}", scores, width=pair, arrow=False)
        if attention.softcap:
            column.box("step", "soft cap", f"{attention.softcap:g} · tanh(score / {attention.softcap:g})", width=pair)
        if attention.positions and attention.positions.bias:
            column.box("step", "position bias", attention.positions.bias, width=pair)
        column.box("step", "mask", MASK_LINES[attention.mask], *filter(None, [_window_line(attention)]), width=pair)
        column.box("step", "softmax", "over the keys" + (" and a sink" if attention.sinks else ""), width=pair)
    total = _Column(picture, x, y=column.y - GAP)
    picture.line((column.x, column.y), (column.x, total.y))
    picture.line((tops[2].x, tops[2].y), (tops[2].x, total.y))
    whole = 3 * NARROW + 28
    value_width = attention.heads * value_size
    heads = f"{attention.heads} heads side by side (B, T, {value_width:,})"
    total.box("step", "weights · v", heads, width=whole, arrow=False)
    total.box("attention", "output", f"{value_width:,} → {width:,}", width=whole)
    total.arrow()
    title = f"Inside {_attention_title(attention, 'attention')}{where}"
    picture.text(x - whole / 2, total.y - 14, title, "title", "start")
    return total.y - 14


MASK_LINES = {
    "causal": "a token sees itself and earlier ones",
    "prefix": "itself, earlier ones, the prefix",
    "full": "padding is left out",
}


def _draw_feedforward_steps(picture: _Picture, x: float, bottom: float, block: BlockConfig, where: str) -> None:
    feedforward, width = block.feedforward, block.width
    column, whole = _Column(picture, x, y=bottom), 3 * NARROW + 28
    picture.text(x, bottom - 3, f"x (B, T, {width:,})")
    column.y -= 16
    start, experts = column.y, feedforward.experts
    act, hidden = ACTIVATION_ROWS[feedforward.activation].label, f"{feedforward.hidden:,}"
    if feedforward.gated:
        branches = [_Column(picture, x + place * whole / 4, y=column.y - 10) for place in (-1.05, 1.05)]
        for name, branch in zip(("gate", "up"), branches, strict=True):
            picture.line((x, column.y), (x, branch.y), (branch.x, branch.y), arrow=False)
            branch.box("feedforward", name, f"{width:,} → {hidden}", width=whole / 2 - 10)
        limit = feedforward.clamp
        branches[0].box("step", act, *([f"of at most {limit:g}"] if limit else []), width=whole / 2 - 10)
        if limit:
            branches[1].box("step", "clamp", f"to ±{limit:g}, plus 1", width=whole / 2 - 10)
        column.y = branches[0].y - 8
        y = column.sum("×", arrow=False)
        for branch, side in zip(branches, (-1, 1), strict=True):
            picture.line((branch.x, branch.y), (branch.x, y), (x + side * 10, y))
    else:
        column.box("feedforward", "up", f"{width:,} → {hidden}", width=whole)
        column.box("step", act, width=whole)
    column.box("feedforward", "down", f"{hidden} → {width:,}", width=whole)
    if experts is not None:  # the router reads x as the expert does, and weighs what the experts return
        top = f"sum of the best {experts.top_k} of {experts.count} experts, weighted"
        column.box("step", "router", top, f"by a softmax of x ({width:,} → {experts.count})", width=whole)
        edge, middle = x + whole / 2, column.y + (9 + TITLE + 2 * DETAIL) / 2
        picture.line((x, start - 4), (edge + BEND, start - 4), (edge + BEND, middle), (edge, middle))
    column.arrow()
    title = "Inside the mixture, one expert" if experts is not None else "Inside feed-forward"
    picture.text(x - whole / 2, column.y - 14, title + where, "title", "start")
