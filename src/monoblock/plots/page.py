"""Write a self-contained HTML page: pictures inside the file, and a viewer of attention weights.

The page loads nothing from elsewhere: pictures are data, and the script and the styles are in the file.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.plots.figure import figure_png
from monoblock.untrusted_files import write_atomically

MAX_VIEWER_BYTES = 12_000_000  # of weights, one byte each; a longer text has pictures only
CSS_DPI = 96  # pixels per inch of a page: letters have the size that they have on paper
MIN_SCALE = 0.75  # of a picture in a narrow window; a wider one is scrolled
TEMPLATE = "page.html"


@dataclass(frozen=True)
class AttentionMap:
    """The weights (H, T, S) of one layer, for the viewer."""

    name: str
    weights: NDArray[np.floating[Any]]
    queries: Sequence[str]
    keys: Sequence[str]


@dataclass
class Section:
    """A heading, a text (with empty lines between its paragraphs), tables and pictures."""

    title: str
    text: str = ""
    figures: list[tuple[Any, str]] = field(default_factory=list)  # matplotlib figures, each with a description
    tables: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = field(default_factory=list)  # columns and rows


def save_page(path: Path, title: str, subtitle: str, sections: Sequence[Section], maps: Sequence[AttentionMap]) -> Path:
    """Write the sections, with a viewer of the attention maps above them, to one HTML file."""
    viewer = _viewer_data(maps)
    if maps and not viewer:
        subtitle += " — The text is too long to view single heads on this page; draw one with --layer and --head."
    template = files("monoblock.plots").joinpath(TEMPLATE).read_text(encoding="utf-8")
    navigation = "".join(f'<a href="#{_anchor(one.title)}">{html.escape(one.title)}</a>' for one in sections)
    values = {
        "TITLE": html.escape(title),
        "SUBTITLE": html.escape(subtitle),
        "NAVIGATION": navigation,
        "SECTIONS": "\n".join(map(_section_html, sections)),
        "DATA": json.dumps(viewer, ensure_ascii=True).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)  # in one pass: a value may have {{DATA}}
    write_atomically(path, page)
    return path


def _viewer_data(maps: Sequence[AttentionMap]) -> list[dict[str, Any]]:
    if sum(one.weights.size for one in maps) > MAX_VIEWER_BYTES:
        return []
    rows = []
    for one in maps:
        # A byte for each weight: 1 to 255 for its square root, which keeps the small weights of long texts apart, and 0
        # for a key that no head may attend to.
        visible = (one.weights > 0).any(0)
        data = np.where(visible, 1 + np.rint(np.sqrt(one.weights) * 254), 0).astype(np.uint8).tobytes()
        row = {"name": one.name, "heads": one.weights.shape[0], "queries": list(one.queries), "keys": list(one.keys)}
        rows.append(row | {"weights": base64.b64encode(data).decode()})
    return rows


def _section_html(section: Section) -> str:
    parts = [f'<section id="{_anchor(section.title)}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in section.text.split("\n\n") if paragraph]
    for columns, rows in section.tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(map(_cell_html, row))}</tr>" for row in rows)
        parts.append(f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
    for figure, description in section.figures:
        data = base64.b64encode(figure_png(figure)).decode()
        width = round(CSS_DPI * float(figure.get_figwidth()))
        size = f'width="{width}" style="min-width: {round(MIN_SCALE * width)}px"'
        alt = html.escape(description, quote=True)
        parts.append(f'<div class="picture"><img src="data:image/png;base64,{data}" {size} alt="{alt}"></div>')
    return "\n".join([*parts, "</section>"])


def _cell_html(value: object) -> str:
    if isinstance(value, float):
        return f'<td class="number">{value:.3g}</td>'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def _anchor(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def metrics_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Return the columns and the rows of a table of JSON objects with the same keys."""
    columns = list(rows[0]) if rows else []
    return columns, [[row[name] for name in columns] for row in rows]
