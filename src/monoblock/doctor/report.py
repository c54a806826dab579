"""The report of an examination: what was found, what passed, what could not be checked; as text, JSON and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from monoblock.untrusted_files import write_atomically

Verdict = Literal["fail", "warn", "unsupported"]
Evidence = Mapping[str, float | int | str]
State = Literal["passed", "fail", "warn", "unsupported", "explained"]

WORDS: dict[Verdict, str] = {"fail": "FAIL", "warn": "WARN", "unsupported": "NOT SUPPORTED"}


@dataclass(frozen=True)
class Finding:
    """A fault: the check that found it, the numbers that show it, why it matters, and what to write instead."""

    check: str
    # "fail": results are wrong; "warn": unusual, and worth a look; "unsupported": no fault, but do not use the model so
    verdict: Verdict
    evidence: Evidence
    reason: str
    fix: str
    title: str = ""  # what is wrong in a few words, where the name of the check does not say it
    explains: tuple[str, ...] = ()  # findings of further checks that have the same cause

    @property
    def docs(self) -> str:
        return f"docs/doctor.md#{self.check}"

    @property
    def heading(self) -> str:
        return f"{self.check}: {self.title}" if self.title else self.check

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "verdict": self.verdict,
            "evidence": dict(self.evidence),
            "reason": self.reason,
            "fix": self.fix,
            "docs": self.docs,
        }


@dataclass(frozen=True)
class CheckResult:
    """How one check ended; `explained_by` names the check whose finding is the cause of this one's."""

    name: str
    state: State
    seconds: float = 0.0
    explained_by: str | None = None


@dataclass(frozen=True)
class NotChecked:
    """A check that did not run: why, and what to pass to run it."""

    reason: str
    how: str = ""  # "": the check does not apply to the model
    argument: str = ""  # that is missing
    condition: str = ""  # what the model must have for the argument to make sense
    check: str = ""


Outcome = Finding | NotChecked | None  # of a check; None: it has passed


@dataclass(frozen=True)
class Panel:
    """A matrix (rows of numbers from 0 to 1) and which of its cells are allowed to be more than 0."""

    title: str
    values: tuple[tuple[float, ...], ...]
    allowed: tuple[tuple[float, ...], ...]  # 0: not allowed
    rows: tuple[str, ...]  # names of rows and columns
    columns: tuple[str, ...]
    row_axis: str = "output at position"
    column_axis: str = "position that is changed"


@dataclass(frozen=True)
class Panels:
    """Matrices side by side; `check` is the check whose finding they show."""

    caption: str
    panels: tuple[Panel, ...]
    check: str | None = None


@dataclass
class Report:
    """The findings of an examination; `ok` is True if none of them has the verdict "fail".

    `unsupported` has what the model cannot do, with numbers, reason and remedy; it counts neither as a fault nor as a
    check that has passed.
    """

    subject: str
    findings: list[Finding] = field(default_factory=list)
    unsupported: list[Finding] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # facts worth knowing that are no fault
    pictures: dict[str, Any] = field(default_factory=dict)  # name -> list of numbers or Panels, for the HTML report
    seconds: float = 0.0
    lengths: tuple[int, ...] = ()  # tokens of the probes; the last may be a long text for causality only

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `doctor --json` prints it."""
        rows = [{"check": row.check, "reason": row.reason, "how": row.how} for row in self.not_checked]
        return {
            "ok": self.ok,
            "findings": [finding.to_dict() for finding in self.findings],
            "unsupported": [finding.to_dict() for finding in self.unsupported],
            "notes": self.notes,
            "passed": [result.name for result in self.checks if result.state == "passed"],
            "explained": {r.name: r.explained_by for r in self.checks if r.state == "explained"},
            "not_checked": rows,
        }

    def html(self, path: str | Path) -> None:
        """Write the report as one self-contained HTML page with pictures."""

        write_atomically(path, render_html(self))

    def __str__(self) -> str:
        return format_report(self)


def format_evidence(evidence: Evidence) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in evidence.items())


def _number(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def format_report(report: Report) -> str:
    """Return the report as text: the findings first, then what passed and what was not checked."""
    lines = [f"{report.subject}: {headline(report)} ({report.seconds:.1f} s)"]
    for finding in (*report.findings, *report.unsupported):
        lines += [
            "",
            f"{WORDS[finding.verdict]}  {finding.heading}",
            f"  evidence  {format_evidence(finding.evidence)}",
            f"  reason    {finding.reason}",
            f"  fix       {finding.fix}",
            f"  read      {finding.docs}",
        ]
    passed = [result.name for result in report.checks if result.state == "passed"]
    lines += ["", f"passed ({len(passed)}): {', '.join(passed) or 'none'}"]
    explained = [result for result in report.checks if result.state == "explained"]
    lines += [f"{result.name} also failed, because of {result.explained_by}" for result in explained]
    if report.lengths:
        more = f", for causality also of {report.lengths[1]}" if len(report.lengths) > 1 else ""
        lines += [f"probes: texts of {report.lengths[0]} tokens{more}"]
    lines += [f"note: {note}" for note in report.notes]
    lines += describe_not_checked(report.not_checked)
    return "\n".join(lines)


def describe_not_checked(rows: Sequence[NotChecked]) -> list[str]:
    """Return a line for each check that failed, one of what does not apply, and one of what else to pass."""
    failed = [f"{row.check}: {row.reason}; {row.how}" for row in rows if row.how and not row.argument]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.how:
            reasons.setdefault(row.reason, []).append(row.check)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    lines = failed + ([f"does not apply: {'; '.join(parts)}"] if parts else [])
    always = dict.fromkeys(row.argument for row in rows if row.argument and not row.condition)
    if_it_has = dict.fromkeys(f"{row.argument} ({row.condition})" for row in rows if row.argument and row.condition)
    waiting = [", ".join(always), f"if the model has it {', '.join(if_it_has)}" if if_it_has else ""]
    if any(waiting):
        lines.append(f"to check more, pass to mb.diagnose {'; '.join(filter(None, waiting))}")
    return lines


def headline(report: Report) -> str:
    """Return the number of findings in words."""
    fails = sum(finding.verdict == "fail" for finding in report.findings)
    warns, limits = len(report.findings) - fails, len(report.unsupported)
    counts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((fails, "failure"), (warns, "warning")) if n]
    more = f", {limits} not supported" if limits else ""
    return f"{' and '.join(counts) or 'no findings'} in {len(report.checks)} checks{more}"


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
    """Return the names to write: all if there is room for them, else every fifth or so."""
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
