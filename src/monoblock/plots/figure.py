"""Create and save matplotlib figures, and write tokens so that they can be read on an axis."""

from __future__ import annotations

import functools
import io
import re
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.errors import FileError, InputError
from monoblock.untrusted_files import write_atomically

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Tokenizer

DPI = 130
FORMATS = (".png", ".svg", ".pdf")
SVG_HEADER = re.compile(r"<!DOCTYPE[^>]*>\s*|<metadata>.*?</metadata>\s*", re.DOTALL)
MAX_TOKENS = 2000  # of a picture; more would be smaller than a pixel
MAX_LABEL = 14  # characters of a token on an axis
MIN_SPACING = 0.13  # inches between two labels, so that they do not overlap
MISSING_GLYPH = "▯"
MARKS = {" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥"}
JOINERS = "\u200c\u200d\ufe0e\ufe0f"  # between letters or emoji, and the choice of a picture or a sign
# The categories of Unicode that cannot be seen. "Cn" is not one: characters newer than this Python, such as emoji.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zs", "Zl", "Zp")
WORD_STARTS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write a space at the start of a token


def create_figure(size: tuple[float, float]) -> Any:
    """Create a figure of (width, height) inches, without pyplot: no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FileError("figures need matplotlib; write pip install 'monoblock[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure in the format that the suffix of the path names; an SVG file names no address of a DTD."""
    content, kind = io.BytesIO(), path.suffix.lower().lstrip(".")
    try:
        figure.savefig(content, format=kind, **({"metadata": {"Date": None}} if kind == "svg" else {"dpi": DPI}))
    except ValueError as error:
        raise FileError(f"{path} cannot be written: {error}") from None
    drawn = content.getvalue()
    write_atomically(path, SVG_HEADER.sub("", drawn.decode("utf-8")) if kind == "svg" else drawn)
    return path


def figure_png(figure: Any) -> bytes:
    """Return a figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()


def check_plot_path(path: Path, formats: str = ".png, .svg or .pdf") -> None:
    """Raise FileError if a figure could not be saved at this path.

    Call this before computing what the figure shows.

    formats: what the error message says can be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FileError("figures need matplotlib; write pip install 'monoblock[plot]'") from None
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"{path} does not end in a format that can be written; write {formats}")
    if not path.absolute().parent.is_dir():
        raise FileError(f"there is no folder {path.parent} for {path.name}; create it first")


class Picture:
    """A figure as a PNG image, which a notebook displays if it is the last value of a cell."""

    def __init__(self, png: bytes) -> None:
        self.png = png

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return "Picture()"


def show(figure: Any, *, dpi: int = 80) -> Picture:
    """Return a figure as a picture for a notebook, of at most 256 colours, so that stored outputs stay small."""
    from PIL import Image  # matplotlib requires it

    drawn, content = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return Picture(content.getvalue())


# -- tokens on an axis -------------------------------------------------------------------------------------------------


def readable_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; ␣ stands for a space, which begins most words.

    A special token is shown by its name, a piece of a word as the tokenizer marks it (##ing), and bytes that are no
    character, or one that cannot be seen, as <E2 80>.
    """
    return [_readable(tokenizer, number) for number in ids]


def _readable(tokenizer: Tokenizer, number: int) -> str:
    if not 0 <= number < tokenizer.vocab_size:  # a model may have more rows than its tokenizer has tokens
        return f"id {number}"
    token = tokenizer.token(number)
    if number in tokenizer.special_ids or token.startswith("##"):
        return token
    text = tokenizer.decode([number])
    data = tokenizer.token_bytes(number)
    if "\N{REPLACEMENT CHARACTER}" in text and data is not None:
        text = data.decode("utf-8", "surrogateescape")
    if token.startswith(WORD_STARTS) and not text.startswith(" "):  # decoding drops the space before the first word
        text = f" {text}"
    for character, mark in MARKS.items():
        text = text.replace(character, mark)
    return _show_hidden(text) or token


def _show_hidden(text: str) -> str:
    """Write what cannot be seen as bytes; joiners can, as a part of what they join, such as an emoji of several."""
    is_joined = any(unicodedata.category(character) not in HIDDEN for character in text if character not in JOINERS)
    parts = []
    for is_seen, run in groupby(text, lambda c: is_joined if c in JOINERS else unicodedata.category(c) not in HIDDEN):
        part = "".join(run)
        parts.append(part if is_seen else f"<{part.encode('utf-8', 'surrogateescape').hex(' ').upper()}>")
    return "".join(parts)


def check_length(count: int) -> None:
    """Raise InputError if a text has too many tokens to draw."""
    if count > MAX_TOKENS:
        raise InputError(f"a picture of {count:,} tokens cannot be read; give a text of at most {MAX_TOKENS:,} tokens")


def shorten(token: str) -> str:
    return token if len(token) <= MAX_LABEL else token[: MAX_LABEL - 1] + "…"


@functools.cache
def _known_characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def drawable(text: str) -> str:
    """Replace characters for which the font has no glyph (Devanagari, Chinese, …) by ▯; HTML pages show them all."""
    known = _known_characters()
    return "".join(character if ord(character) in known else MISSING_GLYPH for character in text)


def choose_labels(tokens: Sequence[str], inches: float) -> tuple[list[int], list[str], float]:
    """Choose the tokens to label on an axis of this length: their places, their labels, and the size of the font.

    Every token is labelled, or every n-th with its number, as many as there is room for.
    """
    step = max(1, -(-len(tokens) * MIN_SPACING // inches))
    step = next(size for size in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000) if size >= step)
    places = list(range(0, len(tokens), step))
    labels = [drawable(shorten(tokens[place])) for place in places]
    if step > 1:
        pairs = zip(map(str, places), labels, strict=True)
        labels = [label if label == place else f"{place} {label}" for place, label in pairs]
    return places, labels, min(9.0, max(6.0, 72 * 0.75 * inches * step / len(tokens)))


def label_axis(axis: Any, side: str, tokens: Sequence[str], inches: float) -> None:
    """Label the x or the y axis with tokens, every one or every n-th with its number, as many as `inches` allow."""
    places, labels, size = choose_labels(tokens, inches)
    if side == "x":
        axis.set_xticks(places, labels, rotation=90, fontsize=size, parse_math=False)
    else:
        axis.set_yticks(places, labels, fontsize=size, parse_math=False)
    axis.tick_params(length=2, pad=2)
