"""Every recipe of the package resolves to a model, trains, and saves a model with the reported loss."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import monoblock as mb
from monoblock.accounting.report import account
from monoblock.baselines.lstm import Recurrent
from monoblock.cli.main import run
from monoblock.data.corpora import docstrings
from monoblock.data.corpora.load import CORPORA, corpus_location, install_hint, load_corpus
from monoblock.errors import ConfigError
from monoblock.interop.model_folder import load_model
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import build_model_config, list_recipes, read_recipe, task_of_recipe
from monoblock.tasks.table import TASKS
from monoblock.tasks.task_data import validate
from monoblock.training.loss import CrossEntropyLoss

DATA = Path(os.environ["MONOBLOCK_DATA"]) if os.environ.get("MONOBLOCK_DATA") else None
SIZES = {"classification": {"classes": 7}, "token_classification": {"classes": 7}}
IMAGE = {"classes": 7, "image": 8, "channels": 1}
SLOW = ("kjv-tasks", "transliterate-multi", "kjv-web", "summarize-docstrings")  # tasks that quicker recipes train too
STEP_KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "seconds"}


@pytest.fixture(autouse=True)
def _restore_determinism():
    """A run may make torch deterministic globally, which other tests do not expect."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short_validation(monkeypatch):
    """Truncate validation splits, read every corpus once, and docstrings of two packages instead of six."""
    for module in ("data.corpora.load", "tasks.task"):
        monkeypatch.setattr(f"monoblock.{module}.load_corpus", load_short_corpus)
    monkeypatch.setattr("monoblock.data.corpora.docstrings.PACKAGES", ("networkx", "numpy"))
    docstrings._read_split.cache_clear()
    yield
    docstrings._read_split.cache_clear()


@cache
def load_short_corpus(name, split="train", **options):
    corpus = load_corpus(name, split, **options)
    return corpus if split == "train" else replace(corpus, rows=corpus.rows[: 30 if corpus.kind == "text" else 200])


def data_sizes(recipe):
    return IMAGE if recipe.model.get("family") == "vit" else SIZES.get(recipe.train.objective, {})


def vocab_size(recipe):
    return None if recipe.model.get("family") == "vit" else recipe.tokenizer.vocab


# -- the schema


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_describes_itself_and_resolves_to_a_model(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.about.endswith(".")
    assert "\n" not in recipe.about
    assert recipe.data.corpus in CORPORA
    config = build_model_config(recipe, vocab_size(recipe), **data_sizes(recipe))
    assert account(config).parameters > 0


@pytest.mark.parametrize("name", list_recipes())
def test_a_dry_run_prints_a_recipe_that_reads_back_the_same_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed, encoding="utf-8")
    assert read_recipe(str(tmp_path / "again.toml")) == read_recipe(name)
    assert set(tomllib.loads(printed)["train"]) >= {"lr", "steps", "batch", "optimizer", "schedule", "warmup", "seed"}
    assert [path.name for path in tmp_path.iterdir()] == ["again.toml"]


def test_every_objective_has_a_recipe():
    """Except chat, which needs the chat template of a model that has one (`finetune`)."""
    objectives = {read_recipe(name).train.objective for name in list_recipes()}
    assert objectives | {"chat"} == {task.name for task in TASKS}


def test_ls_recipes_does_not_import_torch():
    code = """
import sys
from monoblock.cli.main import run
code = run(["ls", "recipes", "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    rows = {row["name"]: row for row in json.loads(process.stdout)["recipes"]}
    assert list(rows) == list_recipes()
    assert rows["gpt2-124m"]["parameters"] == 124_439_808 or rows["gpt2-124m"]["parameters"] is None
    assert rows["digits"]["objective"] == "classification"
    assert rows["digits"]["corpus"] == "digits"
    assert rows["digits"]["about"] == read_recipe("digits").about


# -- training


def tiny_overrides(recipe):
    """Overrides that keep the structure of a recipe but make it small."""
    overrides = [
        "train.steps=2",
        "train.warmup=1",
        "train.batch=64",
        "train.eval_batches=2",
        "generate.max_new_tokens=3",
    ]
    overrides += ["train.workers=0", "train.device=cpu", "train.save_every=1", "train.eval_every=2"]
    overrides += ["train.accumulate=1", "train.sample_every=2", "model.width=16", "model.depth=1"]
    if recipe.tokenizer.kind != "char" and recipe.train.objective != "classification":
        overrides += ["tokenizer.vocab=420"]
    if recipe.data.corpus not in ("digits", "languages"):
        many = recipe.train.objective in ("seq2seq", "text_to_text", "token_classification")
        overrides += ["data.limit=200" if many else "data.limit=40"]
    if "valid" not in CORPORA[recipe.data.corpus].split_names:
        overrides += ["data.validation_rows=20"]
    if recipe.train.objective in ("causal_lm", "masked_lm", "span_corruption") and recipe.model.get("family") != "lstm":
        overrides += ["model.context=32"]
    if recipe.model.get("family") != "lstm":
        overrides += ["model.heads=2"]
    if "kv_heads" in recipe.model:
        overrides += ["model.kv_heads=1"]
    return overrides


def load_trained_model(folder, recipe):
    if recipe.model.get("family") == "lstm":
        return load_model(Recurrent, folder).eval()
    return mb.Transformer.from_pretrained(folder).eval()


def validation_loss(folder):
    """The validation loss of a saved model, computed from its folder alone."""
    recipe = read_recipe(str(folder / "recipe.toml"))
    model = load_trained_model(folder, recipe)
    context = getattr(model.config, "context", None)
    data = build_task_data(recipe, context or int(recipe.model.get("context", 64)), data_folder=DATA, run_folder=folder)
    loss = CrossEntropyLoss(over_positions=task_of_recipe(recipe).classes_are_positions)
    return validate(model, data, loss, torch.device("cpu"))["val_loss"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in list_recipes()]
)
def test_a_recipe_runs_to_a_complete_folder_whose_model_has_the_reported_loss(name, tmp_path, capsys, short_validation):
    recipe = read_recipe(name)
    if corpus_location(recipe.data.corpus, DATA) is None:
        pytest.skip(f"the corpus {recipe.data.corpus} is not here; {install_hint(recipe.data.corpus)}")
    folder = tmp_path / name
    data = ["--data", str(DATA)] if DATA is not None else []
    assert run(["train", name, *tiny_overrides(recipe), "--out", str(folder), "--json", *data]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["steps"] == 2
    lines = [line for line in err.splitlines() if not line.startswith("warning: warmup:")]  # so few steps have none
    assert not any("warning" in line for line in lines)
    assert_complete_folder(folder, tokenizer=CORPORA[recipe.data.corpus].kind != "images")
    assert validation_loss(folder) == pytest.approx(summary["figures"]["val_loss"], rel=1e-5)


def assert_complete_folder(folder, *, tokenizer):
    files = {"config.json", "model.safetensors", "generation_config.json", "recipe.toml", "metrics.jsonl", "README.md"}
    assert {path.name for path in folder.iterdir()} >= files | ({"tokenizer.json"} if tokenizer else set())
    assert (folder / "checkpoints" / "latest").read_text() == "step-2"
    assert (folder / "checkpoints" / "step-2" / "manifest.json").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(set(line) >= STEP_KEYS for line in steps)
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 2]
    assert lines[-1]["final"] is True
    assert not list(folder.rglob("*.tmp"))
    assert (folder / "README.md").read_text().startswith(f"# {read_recipe(str(folder / 'recipe.toml')).name}\n")


@pytest.mark.parametrize(
    ("recipe", "override"), [("reverse", "model.family=lstm"), ("wikitext2-lstm", "model.heads=3")]
)
def test_an_lstm_has_no_sizes_of_transformers(recipe, override):
    with pytest.raises(ConfigError, match=r"model.heads is for Transformers, .* such as wikitext2-lstm"):
        build_model_config(read_recipe(recipe, [override]), 11)
