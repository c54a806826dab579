"""Bar charts and matrices as SVG, with the colours of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from monoblock.doctor.dependence import Panel, Panels

WIDTH, HEIGHT, MARGIN = 640, 200, 48
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#b5bcc2"
SIDE, LEFT, TOP, BOTTOM = 200, 42, 22, 44  # of a matrix, and the room for its labels
MIN_CELL, MAX_CELL = 6.0, 26.0


def draw_panels(picture: Panels) -> str:
    """Return matrices side by side as one SVG."""
    parts, x, height = [], 0.0, 0.0
    for panel in picture.panels:
        drawn, width, tall = _draw_panel(panel, x)
        parts.append(drawn)
        x, height = x + width, max(height, tall)
    return (
        f'<svg viewBox="0 0 {x:.0f} {height:.0f}" width="{x:.0f}" role="img" '
        f'aria-label="{html.escape(picture.caption)}" font-size="11" fill="#1b1b1b">{"".join(parts)}</svg>'
    )


def _draw_panel(panel: Panel, x: float) -> tuple[str, float, float]:
    """Return a matrix at x, its width and its height."""
    rows, columns = len(panel.rows), len(panel.columns)
    cell = min(MAX_CELL, max(MIN_CELL, SIDE / max(rows, columns)))
    width, height, left = cell * columns, cell * rows, x + LEFT
    parts = [f'<text x="{left:.1f}" y="14" font-weight="600">{html.escape(panel.title)}</text>']
    parts.append(f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{height:.1f}" fill="#fff"/>')
    for r, (values, allowed) in enumerate(zip(panel.values, panel.allowed, strict=True)):
        for c, value in enumerate(values):
            if value > 0:
                place = f'x="{left + c * cell:.1f}" y="{TOP + r * cell:.1f}" width="{cell:.1f}" height="{cell:.1f}"'
                colour = BLUE if allowed[c] else ORANGE
                parts.append(f'<rect {place} fill="{colour}" fill-opacity="{0.15 + 0.85 * min(1.0, value):.2f}"/>')
    frame = f'x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{height:.1f}"'
    parts.append(f'<rect {frame} fill="none" stroke="{GREY}"/>')
    for r, name in _ticks(panel.rows, cell):
        y = TOP + (r + 0.5) * cell + 4
        parts.append(f'<text x="{left - 4:.1f}" y="{y:.1f}" text-anchor="end">{html.escape(name)}</text>')
    for c, name in _ticks(panel.columns, cell):
        centre = left + (c + 0.5) * cell
        parts.append(
            f'<text x="{centre:.1f}" y="{TOP + height + 14:.1f}" text-anchor="middle">{html.escape(name)}</text>'
        )
    middle = TOP + height / 2
    parts.append(f'<text x="{left:.1f}" y="{TOP + height + 32:.1f}">{html.escape(panel.column_axis)}</text>')
    if height > 5.5 * len(panel.row_axis):
        turn = f'text-anchor="middle" transform="rotate(-90 {x + 12:.1f} {middle:.1f})"'
        parts.append(f'<text x="{x + 12:.1f}" y="{middle:.1f}" {turn}>{html.escape(panel.row_axis)}</text>')
    needed = max(width, 6.0 * len(panel.column_axis), 7.0 * len(panel.title))
    return "".join(parts), LEFT + needed + 18, TOP + height + BOTTOM


def _ticks(names: Sequence[str], cell: float) -> list[tuple[int, str]]:
    """Return the names that are written: all if there is room for them, else every fifth or so."""
    step = 1 if cell >= 22 else math.ceil(26 / cell)
    ticks = [(i, name) for i, name in enumerate(names) if name and name != "pad" and i % step == 0]
    pads = [i for i, name in enumerate(names) if name == "pad"]
    if not pads:
        return ticks
    middle = pads[len(pads) // 2]
    return [(i, name) for i, name in ticks if abs(i - middle) >= step] + [(middle, "pad")]


def bar_chart(name: str, numbers: Sequence[float]) -> str:
    """Return a bar chart as SVG; the axis is logarithmic if the numbers differ by more than a hundred times."""
    finite = [abs(x) for x in numbers if math.isfinite(x)]
    top = max(finite, default=1.0) or 1.0
    low = min((x for x in finite if x > 0), default=top)
    is_log = top / low > 100
    step = min(80.0, (WIDTH - MARGIN) / max(1, len(numbers)))
    bars = []
    for index, value in enumerate(numbers):
        share = _share(value, low, top, is_log)
        height = share * (HEIGHT - 2 * MARGIN + 24)
        x, y = MARGIN + index * step, HEIGHT - 28 - height
        bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}" fill="#0072b2"/>')
        if len(numbers) <= 24:
            bars.append(f'<text x="{x + step * 0.4:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{index}</text>')
    scale = ", logarithmic" if is_log else ""
    labels = (
        f'<text x="0" y="14">{top:.3g}{scale}</text><text x="0" y="{HEIGHT - 30}">{low if is_log else 0:.2g}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}" font-size="12">'
        f"{labels}{''.join(bars)}</svg>"
    )


def _share(value: float, low: float, top: float, is_log: bool) -> float:
    if not math.isfinite(value):
        return 1.0
    if not is_log:
        return abs(value) / top
    return max(0.02, math.log(max(abs(value), low) / low) / math.log(top / low))
