"""Every recipe that comes with the package: it resolves, it runs, and it leaves a model that can be trusted."""

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
from monoblock.cli.main import run
from monoblock.data import corpora
from monoblock.data.corpora import CORPORA, how_to_get, load, place_of
from monoblock.interop.folder import load_model
from monoblock.recurrent import Recurrent
from monoblock.tasks.ground import evaluate
from monoblock.tasks.lay import lay
from monoblock.tasks.recipe import OBJECTIVES, TRAINS, model_config, names, read
from monoblock.training.objectives import Loss

DATA = Path(os.environ["MONOBLOCK_DATA"]) if os.environ.get("MONOBLOCK_DATA") else None
SIZES = {"classify": {"classes": 7}, "label": {"classes": 7}}
IMAGE = {"classes": 7, "image": 8, "channels": 1}
STEP_KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "seconds"}


@pytest.fixture(autouse=True)
def _as_it_was():
    """A run makes torch deterministic for good; other tests may not want that."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short(monkeypatch):
    """Validation splits cut short, and every corpus read once."""
    monkeypatch.setattr(corpora, "load", shortened)


@cache
def shortened(name, split="train", *, folder=None, kind=None):
    corpus = load(name, split, folder=folder, kind=kind)
    return corpus if split == "train" else replace(corpus, rows=corpus.rows[: 30 if corpus.kind == "text" else 200])


def sizes(recipe):
    return IMAGE if recipe.model.get("family") == "vit" else SIZES.get(recipe.train.objective, {})


def vocab(recipe):
    return None if recipe.model.get("family") == "vit" else recipe.tokenizer.vocab


# -- what they say


@pytest.mark.parametrize("name", names())
def test_a_recipe_says_what_it_is_and_resolves_to_a_model(name):
    recipe = read(name)
    assert recipe.name == name
    assert recipe.about.endswith(".")
    assert "\n" not in recipe.about
    assert recipe.data.corpus in CORPORA
    config = model_config(recipe, vocab(recipe), **sizes(recipe))
    assert account(config).parameters > 0


@pytest.mark.parametrize("name", names())
def test_a_dry_run_prints_every_key_reads_back_the_same_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed, encoding="utf-8")
    assert read(str(tmp_path / "again.toml")) == read(name)
    assert set(tomllib.loads(printed)["train"]) >= {"lr", "steps", "batch", "optimizer", "schedule", "warmup", "seed"}
    assert [path.name for path in tmp_path.iterdir()] == ["again.toml"]


def test_every_objective_has_a_recipe():
    """But chat: its words come from a tokenizer's template, so it goes on from a model that has one (`finetune`)."""
    assert {read(name).train.objective for name in names()} | {"chat"} == set(OBJECTIVES) == set(TRAINS)


def test_ls_recipes_lists_them_without_torch():
    code = """
import sys
from monoblock.cli.main import run
code = run(["ls", "recipes", "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["recipes"]}
    assert list(rows) == names()
    assert rows["gpt2-124m"]["parameters"] == 124_439_808 or rows["gpt2-124m"]["parameters"] is None
    assert rows["digits"]["objective"] == "classify"
    assert rows["digits"]["corpus"] == "digits"
    assert rows["digits"]["about"] == read("digits").about


# -- what they do


def tiny(recipe):
    """Overrides that keep a recipe's structure and take away its size."""
    words = ["train.steps=2", "train.warmup=1", "train.batch=64", "train.eval_batches=2", "generate.max_new_tokens=3"]
    words += ["train.workers=0", "train.device=cpu", "train.save_every=1", "train.eval_every=2"]
    words += ["train.accumulate=1", "train.sample_every=2", "model.width=16", "model.depth=1"]
    if recipe.tokenizer.kind != "char" and recipe.train.objective != "classify":
        words += ["tokenizer.vocab=420"]
    if recipe.data.corpus not in ("digits", "languages"):
        words += ["data.limit=200" if recipe.train.objective in ("pairs", "label") else "data.limit=40"]
    if "valid" not in CORPORA[recipe.data.corpus].splits:
        words += ["data.held=20"]
    if recipe.train.objective in ("causal", "masked", "spans") and recipe.model.get("family") != "lstm":
        words += ["model.context=32"]
    if recipe.model.get("family") != "lstm":
        words += ["model.heads=2"]
    if "kv_heads" in recipe.model:
        words += ["model.kv_heads=1"]
    return words


def loaded(folder, recipe):
    if recipe.model.get("family") == "lstm":
        return load_model(Recurrent, folder).eval()
    return mb.Transformer.from_pretrained(folder).eval()


def measured(folder):
    """The validation loss of the saved model, from nothing but its folder."""
    recipe = read(str(folder / "recipe.toml"))
    model = loaded(folder, recipe)
    context = getattr(model.config, "context", None)
    ground = lay(recipe, context or int(recipe.model.get("context", 64)), data=DATA, folder=folder)
    return evaluate(model, ground, Loss(), torch.device("cpu"))["val_loss"]


@pytest.mark.parametrize("name", names())
def test_a_recipe_runs_to_a_complete_folder_whose_model_has_the_reported_loss(name, tmp_path, capsys, short):
    recipe = read(name)
    if place_of(recipe.data.corpus, DATA) is None:
        pytest.skip(f"the corpus {recipe.data.corpus} is not here; {how_to_get(recipe.data.corpus)}")
    folder = tmp_path / name
    data = ["--data", str(DATA)] if DATA is not None else []
    assert run(["train", name, *tiny(recipe), "--out", str(folder), "--json", *data]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["steps"] == 2
    assert "warning" not in err
    complete(folder, tokenizer=CORPORA[recipe.data.corpus].kind != "images")
    assert measured(folder) == pytest.approx(told["figures"]["val_loss"], rel=1e-5)


def complete(folder, *, tokenizer):
    files = {"config.json", "model.safetensors", "generation_config.json", "recipe.toml", "metrics.jsonl", "README.md"}
    assert {path.name for path in folder.iterdir()} >= files | ({"tokenizer.json"} if tokenizer else set())
    assert (folder / "checkpoints" / "latest").read_text() == "step-2"
    assert (folder / "checkpoints" / "step-2" / "manifest.json").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(set(line) >= STEP_KEYS for line in steps)
    assert [line["step"] for line in lines if "val_loss" in line] == [2]
    assert not list(folder.rglob("*.tmp"))
    assert (folder / "README.md").read_text().startswith(f"# {read(str(folder / 'recipe.toml')).name}\n")
