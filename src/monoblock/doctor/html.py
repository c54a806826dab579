"""Write a report as one HTML file, with pictures as inline SVG and nothing from outside."""

from __future__ import annotations

import html
from collections.abc import Sequence

from monoblock.doctor.dependence import Panels
from monoblock.doctor.report import Finding, Report, describe_not_checked, format_evidence, headline
from monoblock.doctor.svg import bar_chart, draw_panels

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
section { border-left: .4rem solid #0072b2; padding: .6rem 1rem; margin: 1rem 0; background: #f5f7f9; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; margin-bottom: .4rem; } svg { max-width: 100%; }
.bad { color: #d55e00; font-weight: 600; } .good { color: #0072b2; font-weight: 600; }
section.unsupported { border-color: #e69f00; }
section.fail { border-color: #d55e00; } section.warn { border-color: #e69f00; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; } code, td:first-child { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; } td { padding: .15rem .8rem .15rem 0; vertical-align: top; }
"""


LEGEND = (
    "Each column changes one input and shows the outputs that move; darker is more, on a logarithmic scale. "
    '<span class="good">Blue</span> is expected, <span class="bad">orange</span> must not be.'
)


def render_html(report: Report) -> str:
    """Return the report as a page: findings, pictures, checks that passed, and what was not checked."""
    title = f"Report on {report.subject}"
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(headline(report).capitalize())}.</p>"]
    matrices = [picture for picture in report.pictures.values() if isinstance(picture, Panels)]
    for finding in (*report.findings, *report.unsupported):
        own = "".join(_figure(picture) for picture in matrices if picture.check == finding.check)
        parts.append(_section(finding, own))
    parts += [_figure(picture) for picture in matrices if picture.check is None]
    for name, numbers in report.pictures.items():
        if not isinstance(numbers, Panels):
            parts.append(f"<h2>{html.escape(name)}</h2>{bar_chart(name, numbers)}")
    states = [(r.name, r.state + (f" ({r.explained_by})" if r.explained_by else "")) for r in report.checks]
    parts.append(f"<h2>Checks</h2>{_table(states)}")
    parts += [f"<p>Note: {html.escape(note)}</p>" for note in report.notes]
    if report.not_checked:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in describe_not_checked(report.not_checked))
        parts.append(f"<h2>Not checked</h2><ul>{lines}</ul>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _section(finding: Finding, picture: str) -> str:
    rows = {
        "evidence": format_evidence(finding.evidence),
        "reason": finding.reason,
        "fix": finding.fix,
        "read": finding.docs,
    }
    items = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())
    verdict = "not supported" if finding.verdict == "unsupported" else finding.verdict
    title = html.escape(f"{verdict}: {finding.heading}")
    return f'<section class="{finding.verdict}"><h2>{title}</h2><dl>{items}</dl>{picture}</section>'


def _figure(picture: Panels) -> str:
    caption = html.escape(picture.caption[:1].upper() + picture.caption[1:])
    return f"<figure><figcaption>{caption}. {LEGEND}</figcaption>{draw_panels(picture)}</figure>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"
