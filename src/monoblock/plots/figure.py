"""Create and save matplotlib figures."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.untrusted_files import write_atomically


def create_figure(size: tuple[float, float]) -> Any:
    """Create a figure of (width, height) inches, without pyplot: no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FileError("figures need matplotlib; write pip install 'monoblock[plot]'") from None
    return Figure(figsize=size, layout="constrained")


DPI = 130
FORMATS = (".png", ".svg", ".pdf")
SVG_HEADER = re.compile(r"<!DOCTYPE[^>]*>\s*|<metadata>.*?</metadata>\s*", re.DOTALL)


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
