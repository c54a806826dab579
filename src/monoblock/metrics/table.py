"""What every metric is: which values are better, its scale, and what it means.

Evaluation, model cards, plots, experiments, the choice of the best checkpoint and the documentation read these rows.

Accuracies are fractions from 0 to 1 in Python and in JSON, and percentages with a sign in text: 0.8731 and "87.31 %".
Metrics whose published definition goes from 0 to 100 keep that scale everywhere. Error rates in percent get a sign in
text as well.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from monoblock.errors import InputError, did_you_mean

Scale = Literal["number", "fraction", "percent", "count"]


class Metric(NamedTuple):
    name: str
    better: Literal["higher", "lower", ""]  # which values are better; "" for counts and settings
    scale: Scale
    about: str
    label: str = ""  # of an axis; "": the name


ROWS = (
    Metric("loss", "lower", "number", "mean cross-entropy in nats, or the mean of the loss of the task"),
    Metric("perplexity", "lower", "number", "exp(loss)"),
    Metric("bits_per_byte", "lower", "number", "loss in bits per byte of text, comparable between tokenizers"),
    Metric("accuracy", "higher", "fraction", "correct predictions; of texts, those that equal a reference"),
    Metric("token_accuracy", "higher", "fraction", "correct tokens, given the right ones before"),
    Metric("exact", "higher", "fraction", "texts that equal a reference"),
    Metric("top_k", "higher", "fraction", "sources with a reference among the first k hypotheses"),
    Metric("attested", "higher", "fraction", "accuracy if targets of the training split are correct as well"),
    Metric("majority", "", "fraction", "accuracy of always predicting the most frequent class"),
    Metric("plain", "higher", "fraction", "accuracy without calibration"),
    Metric("bleu", "higher", "number", "BLEU-4 of sacreBLEU: 13a, cased (Papineni et al. 2002; Post 2018)"),
    Metric("bleu_lowercased", "higher", "number", "BLEU of lowercased texts", "BLEU, lowercased"),
    Metric("bleu_tokenized", "higher", "number", "lowercased BLEU with the Moses tokenizer, as in older papers"),
    Metric("chrf", "higher", "number", "chrF2: F-score of character n-grams (Popović 2015)", "chrF"),
    Metric("cer", "lower", "percent", "character error rate against the nearest reference"),
    Metric("rouge1", "higher", "number", "F1 of words, from 0 to 100 (Lin 2004)"),
    Metric("rouge2", "higher", "number", "F1 of bigrams, from 0 to 100 (Lin 2004)"),
    Metric("rougeL", "higher", "number", "F1 of the longest common subsequence, from 0 to 100 (Lin 2004)"),
    Metric("f1", "higher", "number", "F1 from 0 to 100, of classes, entities, marks or words of answers"),
    Metric("precision", "higher", "number", "precision from 0 to 100"),
    Metric("recall", "higher", "number", "recall from 0 to 100"),
    Metric("exact_match", "higher", "number", "answers that equal a gold answer, 0 to 100 (Rajpurkar et al. 2016)"),
    Metric("ece", "lower", "percent", "expected calibration error (Guo et al. 2017)"),
    Metric("baseline", "", "number", "F1 of giving each word its most frequent label in training"),
    Metric("margin", "higher", "number", "F1 minus that of the baseline"),
    Metric("k", "", "count", "the k of top_k"),
    Metric("shots", "", "count", "examples in a prompt"),
    Metric("tokens", "", "count", "labels that the loss was measured on"),
    Metric("words", "", "count", "words that were labelled"),
    Metric("sources", "", "count", "rows that were evaluated"),
    Metric("questions", "", "count", "questions that were evaluated"),
    Metric("unanswerable", "", "count", "questions without an answer"),
    Metric("there", "", "count", "examples of a class"),
)
METRICS = {row.name: row for row in ROWS}


def find_metric(name: str) -> Metric:
    """Return the row of a metric; its name may have a prefix that ends in "_", as in val_accuracy."""
    row = _find(name)
    if row is None:
        raise InputError(f"there is no metric {name!r}{did_you_mean(name, METRICS)}; add its row to metrics/table.py")
    return row


def _find(name: str) -> Metric | None:
    while name not in METRICS and "_" in name:
        name = name.partition("_")[2]
    return METRICS.get(name)


def is_better(name: str, value: float, other: float) -> bool:
    """Return whether a value of a metric is better than another; raise InputError if neither direction is."""
    direction = find_metric(name).better
    if not direction:
        raise InputError(f"no values of {name!r} are better than others; choose another metric")
    return value > other if direction == "higher" else value < other


def is_fraction(name: str) -> bool:
    """Whether this is a metric that is a fraction from 0 to 1, which text shows as a percentage."""
    row = _find(name)
    return row is not None and row.scale == "fraction"


def format_metric(name: str, value: float, spec: str = ".4g") -> str:
    """Write the value of a metric: "87.31 %" for a fraction or a percentage, others by `spec`."""
    return _format(find_metric(name), value, spec)


def format_measure(name: str, value: float, spec: str = ".4g") -> str:
    """Write a value that an experiment or a task of the user measured: a metric as such, all else by `spec`."""
    row = _find(name)
    return f"{value:{spec}}" if row is None else _format(row, value, spec)


def _format(row: Metric, value: float, spec: str) -> str:
    if row.scale == "fraction":
        return f"{100 * value:.2f} %"
    return f"{value:.2f} %" if row.scale == "percent" else f"{value:{spec}}"


def format_change(name: str, change: float, spec: str = "+.4g") -> str:
    """Write the difference of two values of a metric: "+1.25 points" (percentage points), others by `spec`."""
    scale = find_metric(name).scale
    if scale in ("fraction", "percent"):
        return f"{change * (100 if scale == 'fraction' else 1):+.2f} points"
    return f"{change:{spec}}"


def format_cell(name: str, value: object) -> object:
    """Return the value of a metric as a cell of a table: text if it has a sign, otherwise unchanged."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    row = find_metric(name)
    return _format(row, value, "") if row.scale in ("fraction", "percent") else value
