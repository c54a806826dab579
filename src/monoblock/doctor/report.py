"""The result of an examination: what was found, which checks passed, and what could not be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["fail", "warn"]
Evidence = Mapping[str, float | int | str]
State = Literal["passed", "fail", "warn", "explained"]

DOCS = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """A fault: the check that found it, the numbers that show it, why it matters, and what to write instead."""

    check: str
    verdict: Verdict  # "fail": results are wrong; "warn": unusual, and worth a look
    evidence: Evidence
    reason: str
    fix: str
    docs: str = ""

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
    how: str


@dataclass
class Report:
    """The findings of an examination; `ok` is True if none of them has the verdict "fail"."""

    subject: str
    findings: list[Finding] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # facts worth knowing that are no fault
    pictures: dict[str, Any] = field(default_factory=dict)  # name -> matrix or list of numbers, for the HTML report
    seconds: float = 0.0
    lengths: tuple[int, ...] = ()  # tokens of the probes; the last may be a long text for causality only

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `doctor --json` prints it."""
        rows = [{"check": row.check, "reason": row.reason, "how": row.how} for row in self.not_checked]
        findings = [finding.to_dict() for finding in self.findings]
        return {"ok": self.ok, "findings": findings, "notes": self.notes, "not_checked": rows}

    def __str__(self) -> str:
        return format_report(self)


def format_evidence(evidence: Evidence) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in evidence.items())


def _number(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def format_report(report: Report) -> str:
    """Return the report as text: the findings first, then what passed and what was not checked."""
    lines = [f"{report.subject}: {_headline(report)}"]
    for finding in report.findings:
        lines += [
            "",
            f"{'FAIL' if finding.verdict == 'fail' else 'WARN'}  {finding.check}",
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
    if report.not_checked:
        lines += ["", "not checked:"]
        lines += [f"  {row.check}: {row.reason}; {row.how}" for row in report.not_checked]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    if not report.findings:
        return f"no findings in {len(report.checks)} checks ({report.seconds:.1f} s)"
    fails = sum(finding.verdict == "fail" for finding in report.findings)
    warns = len(report.findings) - fails
    counts = [f"{n} {word}{'s' if n != 1 else ''}" for n, word in ((fails, "failure"), (warns, "warning")) if n]
    return f"{' and '.join(counts)} in {len(report.checks)} checks ({report.seconds:.1f} s)"
