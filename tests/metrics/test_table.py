"""The rows of metrics, and their scale: accuracies are fractions, written as percentages with a sign."""

import inspect
import re
from typing import get_type_hints

import pytest
from generated_pages import build_recipes_page

from monoblock.errors import InputError
from monoblock.metrics import text
from monoblock.metrics.table import (
    METRICS,
    ROWS,
    find_metric,
    format_cell,
    format_change,
    format_measure,
    format_metric,
    is_better,
    is_fraction,
)
from monoblock.metrics.text import ROUGE_METRICS, TRANSLATION_METRICS
from monoblock.tasks.table import TASKS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_read_by_every_reader(row):
    assert METRICS[row.name] is row
    assert row.about
    assert find_metric(f"val_{row.name}") is row
    assert format_measure(row.name, 0.5) == format_metric(row.name, 0.5)
    signs = {"fraction": (" %", " points"), "percent": (" %", " points")}.get(row.scale, ("5", "5"))
    assert (format_metric(row.name, 0.5)[-len(signs[0]) :], format_change(row.name, 0.5)[-len(signs[1]) :]) == signs
    assert format_cell(row.name, 0.5) == (format_metric(row.name, 0.5) if row.scale in ("fraction", "percent") else 0.5)
    assert is_fraction(row.name) == (row.scale == "fraction")
    if row.better:
        assert is_better(row.name, 2.0, 1.0) == (row.better == "higher") != is_better(row.name, 1.0, 2.0)
        assert not is_better(row.name, 1.0, 1.0)
    else:
        with pytest.raises(InputError, match="choose another metric"):
            is_better(row.name, 2.0, 1.0)


def test_the_metrics_that_are_computed_and_those_of_tasks_have_a_row_and_are_documented():
    computed = {*TRANSLATION_METRICS, *ROUGE_METRICS, *(name for task in TASKS for name in task.metrics)}
    assert computed <= METRICS.keys()
    documented = set(re.findall(r"^\| `(\w+)` \|", build_recipes_page(), flags=re.M))
    assert {row.name for row in ROWS if row.scale != "count"} <= documented


def test_every_score_of_translations_is_in_their_table():
    functions = inspect.getmembers(text, inspect.isfunction)
    scores = {name for name, function in functions if get_type_hints(function).get("return") is text.Score}
    assert {name for name in scores if not name.startswith("_")} <= TRANSLATION_METRICS.keys()


def test_an_unknown_metric_is_an_error():
    for read in (find_metric, lambda name: format_metric(name, 1.0), lambda name: format_cell(name, 1.0)):
        with pytest.raises(InputError, match="there is no metric 'blue'; did you mean 'bleu'"):
            read("blue")
    assert format_measure("milliseconds", 12.5) == "12.5"
    assert not is_fraction("milliseconds")


@pytest.mark.parametrize(
    "name",
    [
        *("accuracy", "top_k", "attested", "majority", "plain", "val_accuracy", "val_word_accuracy", "val_exact"),
        *("classify_accuracy", "val_classify_accuracy", "unanswerable_accuracy"),
    ],
)
def test_accuracies_are_fractions_and_written_as_percentages(name):
    assert is_fraction(name)
    assert format_metric(name, 0.87314) == "87.31 %"
    assert format_metric(name, 1) == "100.00 %"
    assert format_cell(name, 0.5) == "50.00 %"
    assert format_change(name, -0.0125) == "-1.25 points"


@pytest.mark.parametrize("name", ["bleu", "chrf", "rougeL", "f1", "val_f1", "exact_match", "answerable_exact_match"])
def test_published_scales_are_written_as_they_are(name):
    assert not is_fraction(name)
    assert format_metric(name, 38.5) == "38.5"
    assert format_metric(name, 38.456, ".2f") == "38.46"
    assert format_cell(name, 38.5) == 38.5
    assert format_change(name, 1.5) == "+1.5"


@pytest.mark.parametrize("name", ["cer", "ece", "val_cer"])
def test_error_rates_in_percent_get_a_sign(name):
    assert not is_fraction(name)
    assert format_metric(name, 12.5) == "12.50 %"


@pytest.mark.parametrize("value", [None, True, "test", [0.5]])
def test_a_cell_that_is_no_number_is_unchanged(value):
    assert format_cell("accuracy", value) is value
