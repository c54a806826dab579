"""The scale of metrics: accuracies are fractions, written as percentages with a sign; published scales stay."""

import pytest

from monoblock.experiments.arms import ArmResult, ExperimentResult
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


def test_the_table_of_an_experiment_has_percentages_and_its_json_fractions(tmp_path):
    rows = (ArmResult("a", (0.5, 0.6)), ArmResult("b", (0.75, 0.75), {"exact": 0.25, "parameters": 7}))
    result = ExperimentResult("demo", "accuracy", rows)
    columns, cells = result.table()
    assert columns == ["arm", "accuracy", "gain", "deviation", "exact", "parameters"]
    assert cells[0] == ["a", "55.00 %", "+0.00 points", "7.07 %", None, None]
    assert cells[1] == ["b", "75.00 %", "+20.00 points", "0.00 %", "25.00 %", 7]
    row = result.to_json()["rows"][1]
    assert (row["accuracy"], row["gain"], row["exact"]) == (0.75, pytest.approx(0.2), 0.25)
    bleu = ExperimentResult("demo", "bleu", (ArmResult("a", (30.0,)), ArmResult("b", (31.5,))))
    assert bleu.table()[1][1] == ["b", 31.5, 1.5, 0.0]
