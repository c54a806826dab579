"""The result of an examination: what was found, which checks passed, and what could not be checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from monoblock.untrusted_files import write_atomically

Verdict = Literal["fail", "warn", "unsupported"]
Evidence = Mapping[str, float | int | str]
State = Literal["passed", "fail", "warn", "unsupported", "explained"]

DOCS = "docs/doctor.md"
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
    docs: str = ""
    title: str = ""  # what is wrong in a few words, where the name of the check does not say it
    explains: tuple[str, ...] = ()  # findings of further checks that have the same cause

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
    """A check that did not run: why, and what to pass so that it does."""

    check: str
    reason: str
    how: str = ""  # "": the check does not apply to the model
    hand_over: str = ""  # the argument that is missing
    condition: str = ""  # what the model must have for the argument to make sense


Outcome = Finding | NotChecked | None  # of a check; None: it has passed


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
        """Write the report as one HTML page with pictures, which needs nothing from outside."""
        from monoblock.doctor.html import render_html  # which imports this module

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
    """Return a line for each check that failed, one of what does not apply, and one of what else to hand over."""
    failed = [f"{row.check}: {row.reason}; {row.how}" for row in rows if row.how and not row.hand_over]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row.how:
            reasons.setdefault(row.reason, []).append(row.check)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    lines = failed + ([f"does not apply: {'; '.join(parts)}"] if parts else [])
    always = dict.fromkeys(row.hand_over for row in rows if row.hand_over and not row.condition)
    if_it_has = dict.fromkeys(f"{row.hand_over} ({row.condition})" for row in rows if row.hand_over and row.condition)
    waiting = [", ".join(always), f"if the model has it {', '.join(if_it_has)}" if if_it_has else ""]
    if any(waiting):
        lines.append(f"to check more, hand over to mb.diagnose {'; '.join(filter(None, waiting))}")
    return lines


def headline(report: Report) -> str:
    """Return the number of findings in words."""
    fails = sum(finding.verdict == "fail" for finding in report.findings)
    warns, limits = len(report.findings) - fails, len(report.unsupported)
    counts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((fails, "failure"), (warns, "warning")) if n]
    more = f", {limits} not supported" if limits else ""
    return f"{' and '.join(counts) or 'no findings'} in {len(report.checks)} checks{more}"
