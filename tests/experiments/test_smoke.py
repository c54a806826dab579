"""Every experiment of the table runs; in the quick suite a few of them, and what the records promise."""

import dataclasses
import json
from pathlib import Path

import experiment_support as support
import pytest

from monoblock.cli.main import run
from monoblock.experiments.claims import CLAIMS
from monoblock.experiments.library import EXPERIMENTS, load_experiment, recurrence
from monoblock.experiments.results import read_results
from monoblock.experiments.runner import plan_trials
from monoblock.runs.recipe import build_model_config, parse_value, read_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
QUICK = ("scale", "attention-memory", "tying")
RECORDS = {name: load_experiment(name) for name in EXPERIMENTS}


def smoke(name, folder, capsys, *arguments):
    assert run(["compare", name, "--smoke", "--out", str(folder), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def check_smoke(name, folder, capsys):
    result, record = smoke(name, folder, capsys), RECORDS[name]
    chosen = {trial.arm.name for trial in plan_trials(record, {}, folder=folder, smoke=True)}
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
        for term in filter(None, (rule.bounded.first, rule.bounded.second)):
            assert term.arm in {*names, *derived}
            assert term.metric in {*record.columns, *record.curves}
            assert (term.at is not None) == (term.metric in record.curves)


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


# -- another recipe ---------------------------------------------------------------------------------------------------

PAIR_RECIPES = ("kjv-tasks", "kjv-web", "multi30k", "summarize-docstrings", "transliterate-multi", "vowels")


def plan(name, folder, **values):
    smoke = values.pop("smoke", False)
    return plan_trials(RECORDS[name], values, folder=folder, smoke=smoke)


@pytest.mark.parametrize("name", ["recurrence", "backtranslation"])
def test_the_budget_of_an_experiment_is_not_that_of_another_recipe(name, tmp_path, capsys):
    recipe = "kjv-web"
    trial, own = plan(name, tmp_path, recipe=recipe)[0], plan(name, tmp_path)[0]
    assert trial.changes == ()
    assert own.changes == RECORDS[name].changes
    assert run(["compare", name, f"recipe={recipe}", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"Budget: that of the recipe {recipe}\nData: the corpus of the recipe {recipe}\n" in text


def test_stored_results_of_recurrence_are_those_of_a_plain_call(tmp_path):
    stored = read_results([RESULTS / "recurrence.jsonl"], "recurrence")
    assert {json.dumps(result.settings) for result in stored} == {
        json.dumps(trial.settings) for trial in plan("recurrence", tmp_path)
    }


@pytest.mark.parametrize("name", ["reverse", *PAIR_RECIPES])
def test_a_smoke_run_of_recurrence_is_small_with_every_recipe(name, tmp_path):
    trial = plan("recurrence", tmp_path, recipe=name, smoke=True)[0]
    recipe = recurrence.build_recipe(trial)
    assert (recipe.train.steps, recipe.train.workers, recipe.model["width"], recipe.model["depth"]) == (3, 0, 16, 1)
    assert Path(recipe.data.corpus).is_relative_to(tmp_path), "a toy corpus"
    assert not getattr(recipe.task, "tasks", ())


def test_recurrence_runs_with_another_recipe(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    result = smoke("recurrence", tmp_path / "out", capsys, "recipe=vowels", "arms=transformer,lstm")
    assert [row["tokens"] < 1000 for row in result["rows"]] == [True, True]
    assert result["about"]["budget"] == "that of the recipe vowels"
    assert result["about"]["changes"] == list(RECORDS["recurrence"].smoke)


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


def test_the_plan_names_seeds_and_changes_of_the_call(tmp_path, capsys):
    call = ["compare", "heads", "train.steps=7", "seeds=4,5", "arms=1,8", "--dry-run"]
    assert run(call) == 0
    text = capsys.readouterr().out
    assert "\nThis call overrides the budget: train.steps=7\n" in text
    assert "\nSeeds: 4, 5; trials: 4\n" in text
    assert run([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seeds"], found["overrides"]) == ([4, 5], ["train.steps=7"])
    assert run(["compare", "recurrence", "lengths=3", "--dry-run"]) == 0
    assert "lengths=3, pairs=100000" in capsys.readouterr().out


def test_the_plan_names_the_corpus_that_stands_in(tmp_path, capsys):
    call = ["compare", "tying", "--dry-run", "--data", str(tmp_path)]  # a folder without corpora
    assert run(call) == 0
    assert "\nThe corpus wikitext2 was not found" in capsys.readouterr().out
    assert run([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stand_in"] == "kjv"
    assert run([*call, "--smoke", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stand_in"] is None, "a toy corpus is used anyway"


@pytest.fixture
def standing_in(monkeypatch, tmp_path):
    """The words of a call of an experiment whose corpus is not there."""
    monkeypatch.setattr("monoblock.experiments.library.load_experiment", lambda name: support.STANDING_IN)
    (tmp_path / "data").mkdir()
    return ["compare", "any", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]


def test_a_call_names_the_corpus_that_stands_in(standing_in, capsys):
    notice, sentence = "the packaged corpus kjv is used instead", "the packaged corpus kjv was used instead"
    assert run([*standing_in, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0].endswith(notice)
    assert json.loads(shown.out)["about"]["stand_in"] == "kjv"
    assert run([*standing_in, "--table"]) == 0
    assert sentence in capsys.readouterr().out.splitlines()[0]


def test_rules_of_arms_that_did_not_run_are_only_counted(standing_in, capsys):
    assert run([*standing_in, "seeds=1", "arms=old"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 more rules need other arms or seeds; --dry-run shows all rules."
    assert not any("not measured" in line for line in lines)


def test_files_whose_results_have_other_settings_are_named(standing_in, tmp_path, capsys):
    assert run([*standing_in, "seeds=1"]) == 0
    file = (tmp_path / "out" / "results.jsonl").rename(tmp_path / "elsewhere.jsonl")
    capsys.readouterr()
    assert run([*standing_in, "offset=2.0", "--table", "--results", str(file)]) == 2
    assert f"{tmp_path / 'out'} and {file} have no results of any with these options" in capsys.readouterr().err


def test_a_page_is_written_on_request(tmp_path, capsys):
    smoke("scale", tmp_path / "out", capsys, "--write", str(tmp_path / "results"))
    assert sorted(path.suffix for path in (tmp_path / "results").iterdir())[:2] == [".jsonl", ".md"]
    text = (tmp_path / "results" / "scale.md").read_text()
    assert "This was a smoke run" in text
    assert "inconclusive" in text
