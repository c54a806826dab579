"""The report of an examination: what was found, what passed, what could not be checked; as text, JSON and HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from monoblock.errors import FileError
from monoblock.plots.figure import create_figure, label_axis
from monoblock.plots.page import Section, save_page

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
        return f"{WORDS[self.verdict]}  {self.check}{f': {self.title}' if self.title else ''}"

    def rows(self) -> dict[str, str]:
        """Return the lines of the report below the heading."""
        values = {name: f"{v:.3g}" if isinstance(v, float) else str(v) for name, v in self.evidence.items()}
        evidence = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        return {"evidence": evidence, "reason": self.reason, "fix": self.fix, "read": self.docs}

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

    @property
    def headline(self) -> str:
        """The number of findings in words."""
        fails = sum(finding.verdict == "fail" for finding in self.findings)
        warns, limits = len(self.findings) - fails, len(self.unsupported)
        counts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((fails, "failure"), (warns, "warning")) if n]
        more = f", {limits} not supported" if limits else ""
        return f"{' and '.join(counts) or 'no findings'} in {len(self.checks)} checks{more}"

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

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.headline} ({self.seconds:.1f} s)"]
        for finding in (*self.findings, *self.unsupported):
            lines += ["", finding.heading, *(f"  {name:<10}{text}" for name, text in finding.rows().items())]
        passed = [result.name for result in self.checks if result.state == "passed"]
        explained = [result for result in self.checks if result.state == "explained"]
        lines += ["", f"passed ({len(passed)}): {', '.join(passed) or 'none'}"]
        lines += [f"{result.name} also failed, because of {result.explained_by}" for result in explained]
        if self.lengths:
            more = f", for causality also of {self.lengths[1]}" if len(self.lengths) > 1 else ""
            lines += [f"probes: texts of {self.lengths[0]} tokens{more}"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *describe_not_checked(self.not_checked)])

    def html(self, path: str | Path) -> None:
        """Write the report as one self-contained HTML page, with pictures if matplotlib is there."""
        figures: dict[str | None, list[tuple[Any, str]]] = {}
        notes = [f"Note: {note}" for note in self.notes]
        try:
            for name, picture in self.pictures.items():
                drawn = draw_panels(picture) if isinstance(picture, Panels) else _draw_bars(name, picture)
                figures.setdefault(getattr(picture, "check", None), []).append((drawn, name))
        except FileError as problem:
            notes.append(f"Without pictures: {problem}.")
        sections = [
            Section(
                finding.heading,
                "\n\n".join(f"{name.capitalize()}: {text}" for name, text in finding.rows().items()),
                figures.get(finding.check, []),
            )
            for finding in (*self.findings, *self.unsupported)
        ]
        sections += [Section(text[:1].upper() + text[1:], "", [(drawn, text)]) for drawn, text in figures.get(None, [])]
        states = [(r.name, r.state + (f" ({r.explained_by})" if r.explained_by else "")) for r in self.checks]
        sections.append(Section("Checks", "\n\n".join(notes), tables=[(("check", "how it ended"), states)]))
        if lines := describe_not_checked(self.not_checked):
            sections.append(Section("Not checked", "\n\n".join(lines)))
        legend = f" {LEGEND}" if any(isinstance(picture, Panels) for picture in self.pictures.values()) else ""
        headline = f"{self.headline.capitalize()}.{legend}"
        save_page(Path(path), f"Report on {self.subject}", headline, sections, [])


def describe_not_checked(rows: Sequence[NotChecked]) -> list[str]:
    """Return a line for each check that failed, one of what does not apply, and one of what else to pass."""
    lines = [f"{row.check}: {row.reason}; {row.how}" for row in rows if row.how and not row.argument]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.how:
            reasons.setdefault(row.reason, []).append(row.check)
    if reasons:
        parts = (f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
        lines.append(f"does not apply: {'; '.join(parts)}")
    always = dict.fromkeys(row.argument for row in rows if row.argument and not row.condition)
    if_it_has = dict.fromkeys(f"{row.argument} ({row.condition})" for row in rows if row.argument and row.condition)
    waiting = [", ".join(always), f"if the model has it {', '.join(if_it_has)}" if if_it_has else ""]
    if any(waiting):
        lines.append(f"to check more, pass to mb.diagnose {'; '.join(filter(None, waiting))}")
    return lines


# -- pictures ---------------------------------------------------------------------------------------------------------

LEGEND = (
    "In a picture, each column changes one input and shows the outputs that move; darker is more, on a logarithmic "
    "scale. Blue is expected, orange must not be."
)
BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
CELL_INCHES, MIN_SIDE, MAX_SIDE = 0.25, 1.2, 2.6  # of a matrix


def draw_panels(picture: Panels) -> Any:
    """Draw matrices side by side, blue where a cell may be more than 0 and orange where it must not."""
    sizes = [
        [min(MAX_SIDE, max(MIN_SIDE, CELL_INCHES * len(names))) for names in (panel.columns, panel.rows)]
        for panel in picture.panels
    ]
    figure = create_figure((sum(width + 0.9 for width, _ in sizes), 1.2 + max(height for _, height in sizes)))
    all_axes = figure.subplots(1, len(sizes), squeeze=False, width_ratios=[width for width, _ in sizes])[0]
    for axis, panel, (width, height) in zip(all_axes, picture.panels, sizes, strict=True):
        values = np.array(panel.values)[..., None]
        colours = np.where(np.array(panel.allowed, dtype=bool)[..., None], BLUE, ORANGE) / 255
        shades = np.where(values > 0, 0.15 + 0.85 * values.clip(max=1), 0)
        axis.imshow(np.concatenate((colours, shades), -1), interpolation="nearest", aspect="auto")
        axis.set_title(panel.title, fontsize=9)
        axis.set_xlabel(panel.column_axis, fontsize=8)
        axis.set_ylabel(panel.row_axis, fontsize=8)
        label_axis(axis, "x", panel.columns, width)
        label_axis(axis, "y", panel.rows, height)
    return figure


def _draw_bars(name: str, numbers: Sequence[float]) -> Any:
    """Draw a bar for each number; the axis is logarithmic if the numbers differ by more than a hundred times."""
    sizes = [abs(number) for number in numbers if math.isfinite(number)]
    least, most = min((size for size in sizes if size), default=1.0), max(sizes, default=1.0)
    figure = create_figure((6.5, 2.4))
    axis = figure.subplots()
    axis.bar(range(len(numbers)), [abs(number) if math.isfinite(number) else most for number in numbers])
    axis.set_title(name, fontsize=10)
    if most > 100 * least:
        axis.set_yscale("log")
    return figure
