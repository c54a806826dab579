"""Write a report as one HTML file, with pictures as inline SVG and nothing from outside."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from monoblock.doctor.report import Report, format_evidence
from monoblock.errors import FileError

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
section { border-left: .4rem solid #0072b2; padding: .6rem 1rem; margin: 1rem 0; background: #f5f7f9; }
section.fail { border-color: #d55e00; } section.warn { border-color: #e69f00; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; } code, td:first-child { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; } td { padding: .15rem .8rem .15rem 0; vertical-align: top; }
"""
WIDTH, HEIGHT, MARGIN = 640, 200, 48


def write_html(report: Report, path: Path) -> None:
    try:
        path.write_text(render_html(report), encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None


def render_html(report: Report) -> str:
    """Return the report as a page: findings, pictures, checks that passed, and what was not checked."""
    title = f"Report on {report.subject}"
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{_summary(report)}</p>"]
    for finding in report.findings:
        rows = {
            "evidence": format_evidence(finding.evidence),
            "reason": finding.reason,
            "fix": finding.fix,
            "read": finding.docs,
        }
        items = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())
        parts.append(
            f'<section class="{finding.verdict}"><h2>{finding.verdict}: {finding.check}</h2><dl>{items}</dl></section>'
        )
    for name, numbers in report.pictures.items():
        parts.append(f"<h2>{html.escape(name)}</h2>{bar_chart(name, numbers)}")
    states = [(r.name, r.state + (f" ({r.explained_by})" if r.explained_by else "")) for r in report.checks]
    parts.append(f"<h2>Checks</h2>{_table(states)}")
    parts += [f"<p>Note: {html.escape(note)}</p>" for note in report.notes]
    if report.not_checked:
        left = [(row.check, f"{row.reason}; {row.how}") for row in report.not_checked]
        parts.append(f"<h2>Not checked</h2>{_table(left)}")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _summary(report: Report) -> str:
    if not report.findings:
        return f"No findings in {len(report.checks)} checks."
    fails = sum(finding.verdict == "fail" for finding in report.findings)
    return f"{fails} failures and {len(report.findings) - fails} warnings in {len(report.checks)} checks."


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def bar_chart(name: str, numbers: Sequence[float]) -> str:
    """Return a bar chart as SVG; the axis is logarithmic if the numbers differ by more than a hundred times."""
    finite = [abs(x) for x in numbers if math.isfinite(x)]
    top = max(finite, default=1.0) or 1.0
    low = min((x for x in finite if x > 0), default=top)
    is_log = top / low > 100
    step = (WIDTH - MARGIN) / max(1, len(numbers))
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
