"""The rules that turn numbers into a conclusion: what is compared, with which margin, fixed before any run.

A rule computes one number for every seed: a metric of an arm, or its difference or ratio to another arm with the same
seed, which had the same data in the same order. The 95 % confidence interval of their mean (Student's t) is compared
with the bound. If all of it satisfies the bound, the statement is confirmed; if none of it does, contradicted;
otherwise the result is inconclusive. So it is with fewer than three seeds, unless the rule is about a quantity that
does not vary with the seed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

# The 97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom; 1.96 is used beyond.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MIN_SEEDS = 3
Verdict = Literal["confirmed", "contradicted", "inconclusive", "not measured"]
SeedMetrics = Mapping[int, Mapping[str, Any]]  # the metrics of an arm for every seed

TERM = r"(\w+) of ([\w.-]+)(?: at ([\w.]+))?"
NUMBER = r"-?[\d.]+(?:e-?\d+)?"
FORMULA = re.compile(rf"(?:({NUMBER}) <= )?{TERM}(?: ([/-]) {TERM})?(?: (<=|>=) ({NUMBER}))?")


class Term(NamedTuple):
    """A metric of an arm, or a point of it if it is a curve."""

    metric: str
    arm: str
    at: str | None

    def read(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the number: NaN if there is none, and None if it was not finite, which results store as None."""
        value = metrics.get(self.metric, math.nan)
        value = value.get(self.at, math.nan) if isinstance(value, Mapping) else value
        return None if value is None else float(value) if isinstance(value, int | float) else math.nan

    def __str__(self) -> str:
        return f"{self.metric} of {self.arm}" + (f" at {self.at}" if self.at is not None else "")


class Bounded(NamedTuple):
    """What a formula says: a term, or a ratio or a difference of two, between two bounds."""

    first: Term
    second: Term | None
    is_ratio: bool
    least: float
    most: float

    def combine(self, first: float, second: float) -> float:
        if self.second is None:
            return first
        return first - second if not self.is_ratio else first / second if second else math.inf

    def judge(self, low: float, high: float) -> Verdict:
        """Return what an interval of the number says."""
        if low >= self.least and high <= self.most:
            return "confirmed"
        return "contradicted" if high < self.least or low > self.most else "inconclusive"

    def __str__(self) -> str:
        words = str(self.first)
        if self.second is not None:
            words += f" {'divided by' if self.is_ratio else 'minus'} {self.second}"
        if math.isinf(self.least):
            return f"{words} at most {self.most:g}"
        return (
            f"{words} at least {self.least:g}"
            if math.isinf(self.most)
            else (f"{words} between {self.least:g} and {self.most:g}")
        )


@dataclass(frozen=True)
class Rule:
    """A statement that is true if a number is large enough, small enough, or between two bounds."""

    statement: str  # in words: "ALiBi loses at most 1 % at six times the training length"
    # METRIC of ARM [at POINT], alone, divided by another one or less another one, with one bound or two:
    # "perplexity of alibi at 6 / perplexity of alibi at 1 <= 1.01", "0.98 <= accuracy of lstm <= 1.02"
    formula: str
    is_exact: bool = False  # the number does not vary with the seed, so that one is enough
    condition: Rule | None = None  # a rule that must be confirmed, or this one is inconclusive
    added_later: str = ""  # what was added when there were results already: "the rule", "the lower bound"

    @cached_property
    def bounded(self) -> Bounded:
        match = FORMULA.fullmatch(self.formula)
        assert match is not None, f"not a formula: {self.formula}"
        low, *terms, sign, bound = match.groups()
        assert low or bound, f"a rule has a bound: {self.formula}"
        least = float(low or (bound if sign == ">=" else -math.inf))
        most = float(bound) if sign == "<=" else math.inf
        return Bounded(Term(*terms[:3]), Term(*terms[4:]) if terms[3] else None, terms[3] == "/", least, most)

    @property
    def bound(self) -> str:
        """The number and its bounds in words."""
        return f"{self.bounded}" + (f"; {self.added_later} was added after results" if self.added_later else "")

    def conclude(self, results: Mapping[str, SeedMetrics]) -> Conclusion:
        """Apply the rule to the metrics of all arms and seeds; without its condition, it is inconclusive."""
        first, second = self.bounded.first, self.bounded.second or self.bounded.first
        mine, others = results.get(first.arm, {}), results.get(second.arm, {})
        pairs = [(first.read(mine[seed]), second.read(others[seed])) for seed in sorted(set(mine) & set(others))]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        values = [value for a, b in known if not math.isnan(a) and not math.isnan(value := self.bounded.combine(a, b))]
        found = Conclusion(self, "not measured")
        if missing := len(pairs) - len(known):
            reason = f"{missing} of {missing + len(values)} seeds have no finite number"
            found = Conclusion(self, "inconclusive", reason=reason)
        elif values and len(values) < MIN_SEEDS and not self.is_exact:
            found = Conclusion(self, "inconclusive", statistics.fmean(values), None, len(values))
        elif values:
            interval = (min(values), max(values)) if self.is_exact else confidence_interval(values)
            verdict = self.bounded.judge(*interval)
            found = Conclusion(self, verdict, statistics.fmean(values), interval, len(values))
        if self.condition is None or found.verdict == "not measured":
            return found
        if self.condition.conclude(results).verdict == "confirmed":
            return found
        return replace(found, verdict="inconclusive", reason=f'"{self.condition.statement}" is not confirmed')


def read_rules(text: str) -> tuple[Rule, ...]:
    """Read rules from pairs of lines: a statement, and its formula below it.

    After the formula may stand, in brackets, "exact" (`is_exact`), or what was added later ("later: this arm").
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    rules = []
    for statement, formula in zip(lines[::2], lines[1::2], strict=True):
        formula, _, marks = formula.removesuffix("]").partition(" [")
        later = marks.partition("later: ")[2]
        rules.append(Rule(statement, formula, is_exact="exact" in marks.split(), added_later=later))
    return tuple(rules)


@dataclass(frozen=True)
class Conclusion:
    """What a rule says about some results."""

    rule: Rule
    verdict: Verdict
    mean: float | None = None
    interval: tuple[float, float] | None = None
    seeds: int = 0
    reason: str = ""  # why it is inconclusive, if not because of the interval or the number of seeds

    def sentence(self) -> str:
        """Return the conclusion in words, with the number, its interval and the rule."""
        rule = self.rule
        if self.verdict == "not measured":
            return f"{rule.statement}: not measured yet (rule: {rule.bound})."
        verdict = f"{self.verdict}, because {self.reason}" if self.reason else self.verdict
        if self.mean is None:
            return f"{rule.statement}: {verdict} (rule: {rule.bound})."
        number = self._format(self.mean)
        if self.interval is None:
            number += f" with {self.seeds} of at least {MIN_SEEDS} seeds"
        elif not rule.is_exact:
            low, high = map(self._format, self.interval)
            number += f", 95 % interval {low} to {high} of {self.seeds} seeds"
        return f"{rule.statement}: {verdict} ({number}; rule: {rule.bound})."

    def _format(self, value: float) -> str:
        """Write a number with four digits, or with as many as tell it from the bounds of the rule."""
        bounds = (self.rule.bounded.least, self.rule.bounded.most)
        texts = [f"{value:.{digits}g}" for digits in range(4, 9)]
        return next((text for text in texts if value in bounds or float(text) not in bounds), texts[-1])

    def to_json(self) -> dict[str, Any]:
        return {
            "statement": self.rule.statement,
            "rule": self.rule.bound,
            "verdict": self.verdict,
            "mean": self.mean,
            "interval": None if self.interval is None else list(self.interval),
            "seeds": self.seeds,
            "reason": self.reason,
        }


def confidence_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of at least two values."""
    if not all(map(math.isfinite, values)):
        return min(values), max(values)
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half
