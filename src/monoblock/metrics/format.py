"""The scale of every metric, and how a metric is written in text.

Accuracies and shares of exact matches are fractions from 0 to 1 in Python and in JSON, and percentages with a sign in
text: 0.8731 and "87.31 %".  Metrics whose published definition goes from 0 to 100 keep that scale everywhere: BLEU,
chrF, ROUGE, precision, recall and F1, and the exact match of SQuAD.  Error rates in percent get a sign in text as well.
"""

from __future__ import annotations

# Names of metrics, also after a prefix that ends in "_": val_accuracy, classify_accuracy, val_exact.
FRACTIONS = ("accuracy", "top_k", "attested", "exact", "majority", "plain")
PERCENTAGES = ("cer", "ece")


def is_fraction(name: str) -> bool:
    """Whether a metric is a fraction from 0 to 1 that text shows as a percentage."""
    return _ends_with(name, FRACTIONS)


def format_metric(name: str, value: float, spec: str = ".4g") -> str:
    """Write the value of a metric: "87.31 %" for a fraction or a percentage, others by `spec`."""
    scale = _percent_scale(name)
    return f"{value:{spec}}" if scale is None else f"{scale * value:.2f} %"


def format_change(name: str, change: float, spec: str = "+.4g") -> str:
    """Write the difference of two values of a metric: "+1.25 points" (percentage points), others by `spec`."""
    scale = _percent_scale(name)
    return f"{change:{spec}}" if scale is None else f"{scale * change:+.2f} points"


def format_cell(name: str, value: object) -> object:
    """Return the value of a metric as a cell of a table: text if it has a sign, otherwise unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_metric(name, value) if is_number and _percent_scale(name) is not None else value  # type: ignore[arg-type]


def _percent_scale(name: str) -> int | None:
    """Return the factor that makes a metric a percentage; None if text shows it without a sign."""
    return 100 if is_fraction(name) else 1 if _ends_with(name, PERCENTAGES) else None


def _ends_with(name: str, known: tuple[str, ...]) -> bool:
    return name in known or name.endswith(tuple(f"_{one}" for one in known))
