"""The rules that turn numbers into a conclusion: what is compared, with which margin, fixed before any run.

A rule computes one number for every seed: a metric of an arm, or its difference or ratio to another arm with the same
seed, which had the same data in the same order. The 95 % confidence interval of their mean (Student's t) is compared
with the bound. If all of it satisfies the bound, the statement is confirmed; if none of it does, contradicted;
otherwise the result is inconclusive. So it is with fewer than three seeds, unless the rule is about a quantity that
does not vary with the seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# The 97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom; 1.96 is used beyond.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MIN_SEEDS = 3
Verdict = Literal["confirmed", "contradicted", "inconclusive", "not measured"]
SeedMetrics = Mapping[int, Mapping[str, Any]]  # the metrics of an arm for every seed


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A statement that is true if a number is large enough, small enough, or between two bounds."""

    statement: str  # in words: "ALiBi loses at most 1 % at six times the training length"
    metric: str
    arm: str
    at: str | None = None  # the point of the curve, if the metric is one
    quantity: Literal["value", "difference", "ratio"] = "value"  # of arm, arm - other, or arm / other
    other: str | None = None  # the other arm; None: the same
    other_at: str | None = None  # the point for the other arm; None: the same
    other_metric: str | None = None  # the metric of the other arm; None: the same
    at_least: float | None = None
    at_most: float | None = None
    is_exact: bool = False  # the number does not vary with the seed, so that one is enough
    condition: Rule | None = None  # a rule that must be confirmed, or this one is inconclusive
    late: str = ""  # what was added when there were results already: "the rule", "the lower bound", "the condition"

    def __post_init__(self) -> None:
        assert self.at_least is not None or self.at_most is not None, "a rule has a bound"

    @property
    def bound(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            words = f"between {self.at_least:g} and {self.at_most:g}"
        else:
            words = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{self._quantity_in_words()} {words}" + (f"; {self.late} was added after results" if self.late else "")

    def _quantity_in_words(self) -> str:
        mine = _describe(self.metric, self.arm, self.at)
        if self.quantity == "value":
            return mine
        other = _describe(self.other_metric or self.metric, self.other or self.arm, self.other_at or self.at)
        return f"{mine} {'minus' if self.quantity == 'difference' else 'divided by'} {other}"

    def conclude(self, results: Mapping[str, SeedMetrics]) -> Conclusion:
        """Apply the rule to the metrics of all arms and seeds."""
        values, missing = self._values(results), self._count_not_finite(results)
        if missing:
            reason = f"{missing} of {missing + len(values)} seeds have no finite number"
            return Conclusion(self, "inconclusive", reason=reason)
        if not values:
            return Conclusion(self, "not measured")
        mean = statistics.fmean(values)
        if self.is_exact:
            low, high = min(values), max(values)
        elif len(values) < MIN_SEEDS:
            return Conclusion(self, "inconclusive", mean, None, len(values))
        else:
            low, high = confidence_interval(values)
        return Conclusion(self, self._verdict(low, high), mean, (low, high), len(values))

    def _verdict(self, low: float, high: float) -> Verdict:
        least = -math.inf if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        if low >= least and high <= most:
            return "confirmed"
        return "contradicted" if high < least or low > most else "inconclusive"

    def _count_not_finite(self, results: Mapping[str, SeedMetrics]) -> int:
        """Return for how many seeds a metric of the rule was not finite, which results store as None."""
        mine, others = results.get(self.arm, {}), results.get(self.other or self.arm, {})
        return sum(
            _is_not_finite(mine[seed], self.metric, self.at)
            or _is_not_finite(others[seed], self.other_metric or self.metric, self.other_at or self.at)
            for seed in set(mine) & set(others)
        )

    def _values(self, results: Mapping[str, SeedMetrics]) -> list[float]:
        """Return the number of every seed for which both arms have the metric."""
        mine, others = results.get(self.arm, {}), results.get(self.other or self.arm, {})
        values = []
        for seed in sorted(set(mine) & set(others)):
            first = _read(mine[seed], self.metric, self.at)
            second = _read(others[seed], self.other_metric or self.metric, self.other_at or self.at)
            if first is None or (second is None and self.quantity != "value"):
                continue
            if self.quantity == "value":
                values.append(first)
            elif self.quantity == "difference":
                values.append(first - second)  # type: ignore[operator]
            else:
                values.append(first / second if second else math.inf)
        return [value for value in values if not math.isnan(value)]


@dataclass(frozen=True)
class Conclusion:
    """What a rule says about some results."""

    rule: Rule
    verdict: Verdict
    mean: float | None = None
    interval: tuple[float, float] | None = None
    seeds: int = 0
    reason: str = ""  # why it is inconclusive, if not because of the interval or the number of seeds

    def apply_condition(self, condition: Conclusion | None) -> Conclusion:
        """Return this conclusion, or none if its condition is not confirmed."""
        is_open = condition is not None and condition.verdict != "confirmed" and self.verdict != "not measured"
        if condition is None or not is_open:
            return self
        return replace(self, verdict="inconclusive", reason=f'"{condition.rule.statement}" is not confirmed')

    def sentence(self) -> str:
        """Say the conclusion in words, with the number, its interval and the rule."""
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
        bounds = [bound for bound in (self.rule.at_least, self.rule.at_most) if bound is not None]
        texts = [f"{value:.{digits}g}" for digits in range(4, 9)]
        return next((text for text in texts if value in bounds or float(text) not in bounds), texts[-1])

    def to_json(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return {
            "statement": self.rule.statement,
            "rule": self.rule.bound,
            "verdict": self.verdict,
            "mean": self.mean,
            "interval": interval,
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


def _read(metrics: Mapping[str, Any], name: str, at: str | None) -> float | None:
    value = metrics.get(name)
    if isinstance(value, Mapping):
        value = value.get(at)
    return float(value) if isinstance(value, int | float) else None


def _is_not_finite(metrics: Mapping[str, Any], name: str, at: str | None) -> bool:
    value = metrics.get(name, 0.0)
    return (value.get(at, 0.0) if isinstance(value, Mapping) else value) is None


def _describe(metric: str, arm: str, at: str | None) -> str:
    return f"{metric} of {arm}" + (f" at {at}" if at is not None else "")
