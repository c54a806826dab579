"""`monoblock train`: overrides, output, the files it writes, and its errors."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from monoblock.cli.main import run
from monoblock.cli.training import print_resume_command
from monoblock.runs.recipe import read_recipe
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import read_metrics

BOOK = "".join(f"And the {n} sons of the king went up to the house of the LORD.\n" for n in range(600))
RECIPE = """
about = "A toy."

[data]
corpus = "book.txt"

[tokenizer]
kind = "bpe"
vocab = 270

[model]
family = "gpt"
width = 16
depth = 1
heads = 2
context = 19

[train]
steps = 3
batch = 5
eval_every = 3
device = "cpu"
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """Work in a folder with a text and a recipe; restore the settings of torch afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONOBLOCK_DATA", raising=False)
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    (tmp_path / "toy.toml").write_text(RECIPE, encoding="utf-8")
    yield tmp_path
    torch.use_deterministic_algorithms(False)


# -- overrides


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(capsys):
    assert run(["train", "toy.toml", "train.batch=7", "model.depth=2", "tokenizer.kind=char", "--dry-run"]) == 0
    Path("resolved.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    resolved = read_recipe("resolved.toml")
    assert (resolved.train.batch, resolved.model["depth"], resolved.tokenizer.kind) == (7, 2, "char")  # command line
    assert (resolved.train.steps, resolved.model["width"]) == (3, 16)  # file
    assert (resolved.train.optimizer, resolved.train.seed) == ("adamw", 1)  # default
    assert resolved.name == "toy"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=3e-4", 3e-4),
        ("train.deterministic=true", True),
        ("train.schedule=noam", "noam"),
        ("data.corpus=some file.txt", "some file.txt"),
        ('generate.prompt="And "', "And "),
        ("generate.prompt==", "="),
    ],
)
def test_an_override_is_a_toml_value_or_plain_text(override, value):
    section, key = override.split("=")[0].split(".")
    assert getattr(getattr(read_recipe("toy.toml", [override]), section), key) == value


def test_a_knob_on_the_command_line_changes_a_preset(capsys):
    arguments = ["model.width=24", "model.heads=2", "model.depth=1", "model.context=11"]
    preset = RECIPE.replace('family = "gpt"\nwidth = 16\ndepth = 1\nheads = 2\ncontext = 19', 'preset = "gpt2"')
    Path("preset.toml").write_text(preset, encoding="utf-8")
    assert run(["train", "preset.toml", *arguments]) == 0
    config = json.loads(Path("runs/preset/config.json").read_text(encoding="utf-8"))["model"]
    assert config["input"]["context"] == 11
    assert config["decoder"]["pattern"][0]["blocks"][0]["width"] == 24


# -- what it prints and leaves


def test_results_go_to_stdout_progress_to_stderr_and_the_next_verb_is_named(capsys):
    assert run(["train", "toy.toml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Saved runs/toy: val_loss ")
    assert out.count("\n") == 1
    assert "step 3/3" in err
    assert err.splitlines()[-1].startswith("Try: monoblock ")


def test_a_dry_run_refuses_a_model_that_cannot_be_built(capsys):
    assert run(["train", "reverse", "model.residual=parallel", "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "residual='parallel'" in err


def test_an_override_that_changes_nothing_is_said(capsys):
    assert run(["train", "toy.toml", "train.steps=3", "train.lr=2e-3"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == ["note: train.steps=3 changes nothing: the recipe already has this value"]


def test_json_is_one_object_with_the_metrics(capsys):
    assert run(["train", "toy.toml", "--json", "--out", "here"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["folder"] == "here"
    assert result["steps"] == 3
    assert {"val_loss", "val_perplexity", "val_bits_per_byte"} <= set(result["figures"])


def test_the_run_folder_holds_the_resolved_recipe():
    assert run(["train", "toy.toml", "train.seed=5"]) == 0
    assert read_recipe("runs/toy/recipe.toml") == read_recipe("toy.toml", ["train.seed=5"])


def test_a_dry_run_reads_no_data_and_writes_nothing(workspace, capsys):
    (workspace / "book.txt").unlink()
    assert run(["train", "toy.toml", "--dry-run"]) == 0
    assert [path.name for path in workspace.iterdir()] == ["toy.toml"]


def test_two_runs_of_a_recipe_give_the_same_losses(workspace):
    for out in ("one", "two"):
        assert run(["train", "toy.toml", "model.dropout=0.1", "--out", out]) == 0
    one, two = (read_metrics(workspace / out) for out in ("one", "two"))
    assert [line.get("loss") for line in one] == [line.get("loss") for line in two]
    assert (workspace / "one" / "model.safetensors").read_bytes() == (
        workspace / "two" / "model.safetensors"
    ).read_bytes()


def test_a_finished_run_can_be_extended(capsys):
    assert run(["train", "toy.toml"]) == 0
    assert run(["train", "toy.toml", "train.steps=5", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["steps"] == 5


def test_another_tokenizer_can_be_reused(workspace):
    Tokenizer.train("char", [BOOK], specials="none").save_pretrained(workspace / "mine")
    assert run(["train", "toy.toml", "tokenizer.folder=mine"]) == 0
    assert (workspace / "runs/toy/tokenizer.json").read_bytes() == (workspace / "mine/tokenizer.json").read_bytes()


def test_a_run_without_validation_still_ends(workspace, capsys):
    (workspace / "only").mkdir()
    shutil.copy("book.txt", "only/train.txt")
    assert run(["train", "toy.toml", "data.corpus=only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == {}


def test_a_validation_text_shorter_than_the_context_is_still_evaluated(workspace, capsys):
    (workspace / "two").mkdir()
    shutil.copy("book.txt", "two/train.txt")
    (workspace / "two/valid.txt").write_text("And the king.\n", encoding="utf-8")
    arguments = ["data.corpus=two", "model.family=bert", "model.head=masked_lm", "train.objective=masked_lm"]
    assert run(["train", "toy.toml", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["val_loss"] > 0


def test_a_limit_on_samples_loses_no_label(workspace, capsys):
    rows = [{"text": f"{override} {n}", "label": override} for n in range(20) for override in ("yes", "no", "perhaps")]
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = ["data.corpus=rows.jsonl", "data.limit=1", "model.family=bert", "model.head=classifier"]
    assert run(["train", "toy.toml", *arguments, "train.objective=classification", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["val_loss"] > 0


# -- ls runs


def test_ls_runs_reports_the_progress_of_each_run(workspace, capsys):
    assert run(["train", "toy.toml", "--out", "runs/first"]) == 0
    (workspace / "runs/broken").mkdir()
    (workspace / "runs/broken/recipe.toml").write_text("not = = toml", encoding="utf-8")
    (workspace / "runs/broken/metrics.jsonl").write_text('{"step": 4, "loss": 1.0}\n{"step"', encoding="utf-8")
    (workspace / "runs/notes").mkdir()
    capsys.readouterr()
    assert run(["ls", "runs", "--json"]) == 0
    broken, first = json.loads(capsys.readouterr().out)["runs"]
    assert (broken["name"], broken["recipe"], broken["steps"], broken["finished"]) == ("broken", None, 4, False)
    assert (first["name"], first["recipe"], first["steps"], first["of"], first["finished"]) == (
        "first",
        "toy",
        3,
        3,
        True,
    )
    assert first["best_step"] == 3
    assert first["best_val_loss"] > 0
    assert first["lr"] == read_recipe("toy.toml").train.lr
    assert (broken["loss"], broken["lr"]) == (1.0, None)
    assert first["loss"] == [line["loss"] for line in read_metrics("runs/first") if "loss" in line][-1]
    assert run(["ls", "runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_run_without_validation_shows_its_learning_rate_and_last_loss(workspace, capsys):
    assert run(["train", "toy.toml", "--out", "runs/first", "train.eval_every=0"]) == 0
    capsys.readouterr()
    assert run(["ls", "runs"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    values = dict(zip(header.split(), row.split(), strict=False))
    last = [line for line in read_metrics("runs/first") if "loss" in line][-1]
    assert float(values["lr"]) == last["lr"] or float(values["lr"]) == read_recipe("toy.toml").train.lr
    assert row.split()[-2] == f"{last['loss']:.4g}"


def test_the_last_line_of_the_metrics_has_the_final_evaluation(workspace, capsys):
    assert run(["train", "toy.toml", "--out", "runs/first", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    last = read_metrics("runs/first")[-1]
    assert last["final"] is True
    assert last["step"] == 3
    assert last["val_loss"] == figures["val_loss"]
    assert run(["train", "toy.toml", "--out", "runs/first", "--resume"]) == 0
    assert sum("final" in line for line in read_metrics("runs/first")) == 1


HINDI = "यह एक छोटा वाक्य है और यह दूसरा वाक्य है\n"
CODE = "def double(number):\n    return number + number\n\n"


@pytest.mark.parametrize("text", [HINDI, CODE], ids=["Hindi", "code"])
def test_the_suggested_command_continues_words_of_the_corpus(text, workspace, capsys):
    (workspace / "own.txt").write_text(text * 60, encoding="utf-8")
    assert run(["train", "toy.toml", "--out", "runs/first", "data.corpus=own.txt"]) == 0
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert words[:5] == ["Try:", "monoblock", "generate", "runs/first", words[4]]
    assert set(words[4].split()) <= set(text.split())
    assert run(["tokenizer", "train", "own.txt", "--out", "t", "--vocab", "300"]) == 0
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert set(words[5].split()) <= set(text.split())


def test_ls_runs_without_runs_is_not_an_error(capsys):
    assert run(["ls", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


# -- errors


MASKED = ["model.family=bert", "model.head=masked_lm", "train.objective=masked_lm"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gpt-tiyn"], 2, "there is no recipe 'gpt-tiyn'; did you mean 'gpt-tiny'?"),
        (["toy.toml", "train.lrr=1"], 2, "train has no field 'lrr'; did you mean 'lr'?"),
        (["toy.toml", "trian.lr=1"], 2, "no section 'trian'; did you mean 'train'?"),
        (["toy.toml", "lr=1"], 2, "write section.key=value"),
        (["toy.toml", "train.lr"], 2, "write section.key=value"),
        (["toy.toml", "train.objective=causl"], 2, "did you mean 'causal_lm'?"),
        (["toy.toml", "train.steps=ten"], 2, "error: train.steps='ten' is not a whole number"),
        (["toy.toml", "train.steps=0"], 2, "too small"),
        (["toy.toml", "model.family=gptt"], 2, "did you mean 'gpt'?"),
        (["toy.toml", "model.preset=gpt2"], 2, "exactly one of the keys preset, family and folder"),
        (["gpt-tiny", "model.preset=gpt-tinny"], 2, "did you mean 'gpt-tiny'?"),
        (["toy.toml", "model.dpeth=2"], 2, "did you mean 'depth'?"),
        (["toy.toml", "model.heads=3"], 2, "heads"),
        (["toy.toml", "model.vocab=40"], 2, "less than the 270 tokens of the tokenizer"),
        (["toy.toml", "train.schedule=cosin"], 2, "did you mean 'cosine'?"),
        (["toy.toml", "train.objective=seq2seq"], 2, "trains encoder-decoder models with the head 'language_model'"),
        (["toy.toml", *MASKED, "model.head=pooled"], 2, "this model is encoder-only with the head 'pooled'"),
        (["toy.toml", "train.lr=-1"], 2, "train.lr=-1 is too small; write 0 or more"),
        (["toy.toml", "train.ema=1"], 2, "train.ema=1 is not a rate"),
        (["toy.toml", "model.dropout=x"], 2, "model.dropout='x' is not a number"),
        (
            ["toy.toml", "model.family=bert", "train.objective=classification", "data.corpus=digits"],
            2,
            "the corpus digits is images, but this model reads text",
        ),
        (["digits", "data.corpus=book.txt"], 1, "book.txt"),
        (["toy.toml", "data.corpus=digits"], 2, "needs text or tokens, but the corpus digits is images"),
        (["toy.toml", "data.corpus=kjvv"], 1, "no corpus, file or folder 'kjvv'; did you mean 'kjv'?"),
        (["toy.toml", "data.corpus=empty.txt"], 1, "empty.txt"),
        (["toy.toml", "data.corpus=short.txt"], 1, "too few for context=19"),
        (["toy.toml", "tokenizer.folder=nowhere"], 1, "tokenizer.folder=nowhere has no tokenizer.json"),
        (
            ["toy.toml", "tokenizer.folder=plain", *MASKED],
            1,
            "has no mask token, which train.objective='masked_lm' needs",
        ),
        (["nowhere.toml"], 1, "there is no recipe file nowhere.toml"),
        (["bad.toml"], 1, "bad.toml is not valid TOML"),
        (["bare.toml"], 2, "lacks the field 'data'"),
        (["toy.toml", "--resume"], 1, "there is nothing to resume in runs/toy"),
        (["toy.toml", "--data", "nowhere"], 2, "nowhere"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_files(arguments, code, message, workspace, capsys):
    (workspace / "empty.txt").write_text("", encoding="utf-8")
    (workspace / "short.txt").write_text("And.", encoding="utf-8")
    (workspace / "bad.toml").write_text("a = = b", encoding="utf-8")
    (workspace / "bare.toml").write_text('[model]\nfamily = "gpt"\n', encoding="utf-8")
    Tokenizer.train("char", [BOOK], specials="none").save_pretrained(workspace / "plain")
    assert run(["train", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (workspace / "runs").exists()


def test_the_resume_command_names_the_folder_of_corpora(capsys):
    print_resume_command(Path("runs/toy"), 3, ["train", "toy.toml"], Path("my data"), {"LOCAL_WORLD_SIZE": "2"})
    expected = "Resume with: monoblock train toy.toml --resume --out runs/toy --data 'my data' --nproc 2\n"
    assert capsys.readouterr().err.endswith(expected)


def test_an_existing_run_is_not_overwritten(workspace, capsys):
    assert run(["train", "toy.toml"]) == 0
    before = {path: path.read_bytes() for path in (workspace / "runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(["train", "toy.toml"]) == 2
    assert (
        capsys.readouterr().err
        == "error: runs/toy is not empty; continue its run with --resume (in Python, resume=True), "
        "or choose another folder with --out (out=…)\n"
    )
    assert {path: path.read_bytes() for path in (workspace / "runs").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("override", "what"),
    [("model.depth=2", "model.depth (1, and now 2)"), ("train.lr=1", "train.lr (0.001, and now 1)")],
)
def test_resuming_with_another_recipe_is_an_error(override, what, capsys):
    assert run(["train", "toy.toml"]) == 0
    assert run(["train", "toy.toml", "train.steps=5", override, "--resume"]) == 1
    assert f"this run was started with another {what}" in capsys.readouterr().err


def test_resuming_with_another_tokenizer_is_an_error(workspace, capsys):
    assert run(["train", "toy.toml"]) == 0
    Tokenizer.train("bpe", ["another text altogether " * 9], 270, specials="none").save_pretrained(
        workspace / "runs/toy"
    )
    assert run(["train", "toy.toml", "train.steps=5", "--resume"]) == 1
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
