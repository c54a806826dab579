"""The scale of metrics: accuracies are fractions, written as percentages with a sign; published scales stay."""

import pytest

from monoblock.metrics.format import format_cell, format_change, format_metric, is_fraction


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
