"""Save one picture of a stored model: the attention of all its heads on a text."""

from __future__ import annotations

from pathlib import Path

from monoblock.plots.figure import check_plot_path, save_figure
from monoblock.runs.inspect.attention import attention_part
from monoblock.runs.inspect.inputs import encode_input
from monoblock.runs.inspect.part import Request
from monoblock.runs.load import load


def save_attention(folder: Path, text: str, path: Path) -> Path:
    """Draw the attention of every head of a model folder on a text to a .png, .svg or .pdf file."""
    check_plot_path(path)
    pipe = load(folder, device="cpu")
    figure, _ = attention_part(Request(pipe, encode_input(pipe, text))).section.figures[0]
    return save_figure(figure, path)
