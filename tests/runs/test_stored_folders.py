"""Folders written by version 0.1: weights load bit for bit, recipes are read, runs are resumed.

fixtures/version-0.1 was written by that version: two runs of eight steps, of which the checkpoint at step 4 is kept.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import monoblock as mb
from monoblock.runs.prepare_run import prepare_run
from monoblock.runs.recipe import read_recipe

FIXTURES = Path(__file__).parents[1] / "fixtures" / "version-0.1"
RUNS = ["gpt", "pairs"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the fixtures to work in; the recipes name their corpora by relative paths."""
    shutil.copytree(FIXTURES, tmp_path / "version-0.1")
    monkeypatch.chdir(tmp_path / "version-0.1")
    return tmp_path / "version-0.1"


def training_losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("name", RUNS)
def test_weights_load_bit_for_bit(name):
    stored = load_file(FIXTURES / name / "model.safetensors")
    loaded = mb.Transformer.from_pretrained(FIXTURES / name).state_dict()
    assert {key: tensor for key, tensor in loaded.items() if key not in stored} == {}
    assert all(torch.equal(loaded[key], tensor) for key, tensor in stored.items())


def test_a_loaded_folder_generates_and_translates():
    assert isinstance(mb.load(FIXTURES / "gpt").generate("in the", max_new_tokens=5, seed=1), str)
    assert isinstance(mb.load(FIXTURES / "pairs").translate("daythe"), str)


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_recipe_equals_the_one_it_was_written_from(name):
    by_hand, stored = (read_recipe(FIXTURES / path, warn=False) for path in (f"{name}.toml", f"{name}/recipe.toml"))
    assert by_hand == stored
    assert stored.train.steps == 8


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_checkpoint_has_the_losses_of_the_uninterrupted_run(name, folder):
    expected = training_losses(folder / name)
    for file in ("model.safetensors", "README.md"):
        (folder / name / file).unlink()
    lines = (folder / name / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / name / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    run = prepare_run(read_recipe(folder / name / "recipe.toml", warn=False), folder / name, resume=True)
    list(run.events(resume=True))
    losses = training_losses(folder / name)
    assert list(losses) == list(range(1, 9))
    assert losses == pytest.approx(expected, rel=1e-5)  # bit for bit on the machine that wrote them
    final = load_file(folder / name / "model.safetensors")
    stored = load_file(FIXTURES / name / "model.safetensors")
    # A key bias has hardly any gradient, so Adam moves it by rounding.
    torch.testing.assert_close(final, stored, rtol=0, atol=5e-3)


def test_a_run_that_held_out_the_last_rows_is_resumed_and_evaluated_with_them(folder):
    """Version 0.1 had no key data.split; its runs on a single file held out the last tenth."""
    last = [line.split("\t")[0] for line in (folder / "pairs.tsv").read_text().splitlines()[-4:]]
    assert mb.load(folder / "pairs").data_section.split == "last"
    run = prepare_run(read_recipe(folder / "pairs.toml", warn=False), folder / "pairs", resume=True)
    assert run.recipe.data.split == "last"
    assert [row.source for row in run.task_data.validation_rows][-4:] == last
    samples = mb.evaluate(folder / "pairs", str(folder / "pairs.tsv"), samples=99).samples
    assert [sample["source"] for sample in samples] == [row.source for row in run.task_data.validation_rows]


@pytest.mark.parametrize("name", RUNS)
def test_training_the_recipe_again_gives_the_same_losses(name, folder):
    run = prepare_run(read_recipe(folder / f"{name}.toml", ["data.split=last"], warn=False), folder / "again")
    list(run.events())
    assert training_losses(folder / "again") == pytest.approx(training_losses(folder / name), rel=1e-5)
