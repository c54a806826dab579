"""Every experiment of the table runs; in the quick suite a few of them, and what the records promise."""

import dataclasses
import json

import pytest

from monoblock.cli.main import run
from monoblock.experiments.claims import CLAIMS
from monoblock.experiments.frame.runner import Request, plan_trials
from monoblock.experiments.names import EXPERIMENTS
from monoblock.experiments.table import load_experiment
from monoblock.recipes.parse import parse_value
from monoblock.runs.recipe import build_model_config, read_recipe

QUICK = ("scale", "attention-memory", "sparse", "tying")
RECORDS = {name: load_experiment(name) for name in EXPERIMENTS}


def smoke(name, folder, capsys, *arguments):
    assert run(["compare", name, "--smoke", "--out", str(folder), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def check_smoke(name, folder, capsys):
    result, record = smoke(name, folder, capsys), RECORDS[name]
    chosen = {trial.arm.name for trial in plan_trials(record, Request(folder=folder, values={}, smoke=True))}
    assert {row["arm"] for row in result["rows"]} >= chosen
    assert all(row[column] is not None for row in result["rows"] for column in record.columns if column in row)
    assert any(row["values"][record.columns[0]] for row in result["rows"])
    assert (folder / "result.json").is_file()
    assert smoke(name, folder, capsys)["rows"] == result["rows"], "nothing is run again"


@pytest.mark.parametrize("name", QUICK)
def test_a_smoke_run_of_a_quick_experiment(name, tmp_path, capsys):
    check_smoke(name, tmp_path / "out", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in QUICK])
def test_a_smoke_run_of_every_experiment(name, tmp_path, capsys):
    if name in ("norm-placement", "smoothing", "backtranslation", "pretraining"):
        pytest.importorskip("sacrebleu")
    check_smoke(name, tmp_path / "out", capsys)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_is_consistent(name):
    """Its rules name arms, columns and curves that exist, and its arms have different names."""
    record = RECORDS[name]
    names = [arm.name for arm in record.arms]
    assert record.name == name
    assert len(set(names)) == len(names)
    assert record.claim
    assert record.source
    assert record.budget
    assert record.data
    assert record.reading
    assert record.rules
    assert {*record.default_arms, *record.smoke_arms} <= set(names)
    derived = {"fit"} if record.summarize is not None else set()
    for rule in record.rules:
        assert {rule.arm, rule.other or rule.arm} <= {*names, *derived}
        known = {*record.columns, *record.curves}
        assert rule.metric in known
        assert (rule.other_metric or rule.metric) in known
        assert (rule.at is not None) == (rule.metric in record.curves)


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record.recipe])
def test_the_full_recipe_of_every_arm_builds_a_model(name):
    """The arms that --smoke makes small are also valid at full size."""
    record = RECORDS[name]
    for arm in record.arms:
        recipe = read_recipe(arm.recipe or record.recipe, [*record.changes, *arm.changes])
        assert build_model_config(recipe, int(recipe.model.get("vocab", 8000))).width > 0


def test_every_claim_is_judged_by_rules_that_exist():
    for claim in CLAIMS:
        assert claim.experiment or claim.table
        if claim.experiment:
            assert claim.rules
            assert max(claim.rules) < len(RECORDS[claim.experiment].rules)
    tested = {claim.experiment for claim in CLAIMS}
    assert set(EXPERIMENTS) <= tested


def test_the_options_of_an_experiment_parse_as_they_are_written():
    for record in RECORDS.values():
        for field in dataclasses.fields(record.options):
            if isinstance(field.default, str):
                assert str(parse_value(field.default) if field.default else "") == field.default


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_without_running(tmp_path, capsys):
    assert run(["compare", "tying", "--dry-run", "--out", str(tmp_path / "none")]) == 0
    text = capsys.readouterr().out
    assert "tying lowers perplexity by at least 1 %: perplexity of tied divided by perplexity of untied" in text
    assert not (tmp_path / "none").exists()
    assert run(["compare", "tying", "--table", "--smoke", "--out", str(tmp_path / "none")]) == 2
    assert run(["compare", "tying", "model.tie=none", "--smoke", "--out", str(tmp_path / "none")]) == 2
    assert "model.tie is what the arm tied sets" in capsys.readouterr().err
    assert run(["compare", "heads", "model.nope=4", "--dry-run"]) == 2
    assert "nope" in capsys.readouterr().err
    assert run(["compare", "scale", "train.steps=5", "--dry-run"]) == 2
    assert "scale trains nothing, so it has no train.steps" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(["compare", "scale", "--out", str(tmp_path / "file")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_page_is_written_on_request(tmp_path, capsys):
    smoke("scale", tmp_path / "out", capsys, "--write", str(tmp_path / "results"))
    assert sorted(path.suffix for path in (tmp_path / "results").iterdir())[:2] == [".jsonl", ".md"]
    text = (tmp_path / "results" / "scale.md").read_text()
    assert "This was a smoke run" in text
    assert "inconclusive" in text
