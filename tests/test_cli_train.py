"""`monoblock train`: overrides, what it prints, what it leaves, and what it says when it cannot."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from monoblock.cli.main import run
from monoblock.cli.train import say_how_to_go_on
from monoblock.tasks.recipe import read
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import metrics

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
def desk(tmp_path, monkeypatch):
    """A folder of its own with a book and a recipe in it; torch is left as it was."""
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
    resolved = read("resolved.toml")
    assert (resolved.train.batch, resolved.model["depth"], resolved.tokenizer.kind) == (7, 2, "char")  # the word
    assert (resolved.train.steps, resolved.model["width"]) == (3, 16)  # the file
    assert (resolved.train.optimizer, resolved.train.seed) == ("adamw", 1)  # the default
    assert resolved.name == "toy"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.lr=3e-4", 3e-4),
        ("train.deterministic=true", True),
        ("train.schedule=noam", "noam"),
        ("data.corpus=some file.txt", "some file.txt"),
        ('generate.prompt="And "', "And "),
        ("generate.prompt==", "="),
    ],
)
def test_an_override_is_a_toml_value_or_plain_text(word, value):
    section, key = word.split("=")[0].split(".")
    assert getattr(getattr(read("toy.toml", [word]), section), key) == value


def test_a_knob_of_the_command_line_changes_a_preset(capsys):
    words = ["model.width=24", "model.heads=2", "model.depth=1", "model.context=11"]
    preset = RECIPE.replace('family = "gpt"\nwidth = 16\ndepth = 1\nheads = 2\ncontext = 19', 'preset = "gpt2"')
    Path("preset.toml").write_text(preset, encoding="utf-8")
    assert run(["train", "preset.toml", *words]) == 0
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


def test_json_is_one_object_with_the_figures(capsys):
    assert run(["train", "toy.toml", "--json", "--out", "here"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == "here"
    assert told["steps"] == 3
    assert {"val_loss", "val_perplexity", "val_bits_per_byte"} <= set(told["figures"])


def test_the_resolved_recipe_lies_in_the_run_folder():
    assert run(["train", "toy.toml", "train.seed=5"]) == 0
    assert read("runs/toy/recipe.toml") == read("toy.toml", ["train.seed=5"])


def test_a_dry_run_reads_no_data_and_writes_nothing(desk, capsys):
    (desk / "book.txt").unlink()
    assert run(["train", "toy.toml", "--dry-run"]) == 0
    assert [path.name for path in desk.iterdir()] == ["toy.toml"]


def test_two_runs_of_a_recipe_give_the_same_losses(desk):
    for out in ("one", "two"):
        assert run(["train", "toy.toml", "model.dropout=0.1", "--out", out]) == 0
    one, two = (metrics.read(desk / out) for out in ("one", "two"))
    assert [line.get("loss") for line in one] == [line.get("loss") for line in two]
    assert (desk / "one" / "model.safetensors").read_bytes() == (desk / "two" / "model.safetensors").read_bytes()


def test_a_finished_run_can_go_on_further(capsys):
    assert run(["train", "toy.toml"]) == 0
    assert run(["train", "toy.toml", "train.steps=5", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["steps"] == 5


def test_another_tokenizer_can_be_reused(desk):
    Tokenizer.train("char", [BOOK], specials="none").save_pretrained(desk / "mine")
    assert run(["train", "toy.toml", "tokenizer.folder=mine"]) == 0
    assert (desk / "runs/toy/tokenizer.json").read_bytes() == (desk / "mine/tokenizer.json").read_bytes()


def test_a_run_without_validation_still_ends(desk, capsys):
    (desk / "only").mkdir()
    shutil.copy("book.txt", "only/train.txt")
    assert run(["train", "toy.toml", "data.corpus=only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"] == {}


def test_hidden_tokens_of_a_validation_text_shorter_than_the_context_are_asked_all_the_same(desk, capsys):
    (desk / "two").mkdir()
    shutil.copy("book.txt", "two/train.txt")
    (desk / "two/valid.txt").write_text("And the king.\n", encoding="utf-8")
    words = ["data.corpus=two", "model.family=bert", "model.head=masked_lm", "train.objective=masked"]
    assert run(["train", "toy.toml", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["val_loss"] > 0


def test_a_limit_on_samples_loses_no_label(desk, capsys):
    rows = [{"text": f"{word} {n}", "label": word} for n in range(20) for word in ("yes", "no", "perhaps")]
    (desk / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["data.corpus=rows.jsonl", "data.limit=1", "model.family=bert", "model.head=classifier"]
    assert run(["train", "toy.toml", *words, "train.objective=classify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["val_loss"] > 0


# -- ls runs


def test_ls_runs_says_how_far_each_came(desk, capsys):
    assert run(["train", "toy.toml", "--out", "runs/first"]) == 0
    (desk / "runs/broken").mkdir()
    (desk / "runs/broken/recipe.toml").write_text("not = = toml", encoding="utf-8")
    (desk / "runs/broken/metrics.jsonl").write_text('{"step": 4, "loss": 1.0}\n{"step"', encoding="utf-8")
    (desk / "runs/notes").mkdir()
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
    assert run(["ls", "runs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_ls_runs_where_there_are_none_is_no_error(capsys):
    assert run(["ls", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


# -- what cannot be


MASKED = ["model.family=bert", "model.head=masked_lm", "train.objective=masked"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["gpt-tiyn"], 2, "there is no recipe 'gpt-tiyn'; did you mean 'gpt-tiny'?"),
        (["toy.toml", "train.lrr=1"], 2, "train has no field 'lrr'; did you mean 'lr'?"),
        (["toy.toml", "trian.lr=1"], 2, "no section 'trian'; did you mean 'train'?"),
        (["toy.toml", "lr=1"], 2, "write section.key=value"),
        (["toy.toml", "train.lr"], 2, "write section.key=value"),
        (["toy.toml", "train.objective=causl"], 2, "did you mean 'causal'?"),
        (["toy.toml", "train.steps=ten"], 2, "error: train.steps='ten' cannot be: it is a whole number"),
        (["toy.toml", "train.steps=0"], 2, "too small"),
        (["toy.toml", "model.family=gptt"], 2, "did you mean 'gpt'?"),
        (["toy.toml", "model.preset=gpt2"], 2, "a preset, a family or a folder"),
        (["gpt-tiny", "model.preset=gpt-tinny"], 2, "did you mean 'gpt-tiny'?"),
        (["toy.toml", "model.dpeth=2"], 2, "did you mean 'depth'?"),
        (["toy.toml", "model.heads=3"], 2, "heads"),
        (["toy.toml", "model.vocab=40"], 2, "less than the 270 tokens of the tokenizer"),
        (["toy.toml", "train.schedule=cosin"], 2, "did you mean 'cosine'?"),
        (["toy.toml", "train.objective=pairs"], 2, "trains encoder-decoder models with the head 'language_model'"),
        (["toy.toml", *MASKED, "model.head=pooled"], 2, "this one is encoder-only with 'pooled'"),
        (["toy.toml", "train.lr=-1"], 2, "train.lr=-1 is too small; write 0 or more"),
        (["toy.toml", "train.ema=1"], 2, "train.ema=1 is no rate"),
        (["toy.toml", "model.dropout=x"], 2, "model.dropout='x' cannot be: it is a number"),
        (
            ["toy.toml", "model.family=bert", "train.objective=classify", "data.corpus=digits"],
            2,
            "the corpus digits is images, and this model reads text",
        ),
        (["digits", "data.corpus=book.txt"], 1, "book.txt"),
        (["toy.toml", "data.corpus=digits"], 2, "needs text, but the corpus digits is images"),
        (["toy.toml", "data.corpus=kjvv"], 1, "no corpus, file or folder 'kjvv'; did you mean 'kjv'?"),
        (["toy.toml", "data.corpus=empty.txt"], 1, "empty.txt"),
        (["toy.toml", "data.corpus=short.txt"], 1, "too few for a context of 19"),
        (["toy.toml", "tokenizer.folder=nowhere"], 1, "tokenizer.folder=nowhere has no tokenizer.json"),
        (["toy.toml", "tokenizer.folder=plain", *MASKED], 1, "has no mask, which train.objective='masked' needs"),
        (["nowhere.toml"], 1, "there is no recipe file nowhere.toml"),
        (["bad.toml"], 1, "bad.toml is not TOML"),
        (["bare.toml"], 2, "lacks the field 'data'"),
        (["toy.toml", "--resume"], 1, "there is nothing to resume in runs/toy"),
        (["toy.toml", "--data", "nowhere"], 2, "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(words, code, said, desk, capsys):
    (desk / "empty.txt").write_text("", encoding="utf-8")
    (desk / "short.txt").write_text("And.", encoding="utf-8")
    (desk / "bad.toml").write_text("a = = b", encoding="utf-8")
    (desk / "bare.toml").write_text('[model]\nfamily = "gpt"\n', encoding="utf-8")
    Tokenizer.train("char", [BOOK], specials="none").save_pretrained(desk / "plain")
    assert run(["train", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not (desk / "runs").exists()


def test_the_command_that_goes_on_names_the_folder_of_corpora(capsys):
    say_how_to_go_on(Path("runs/toy"), 3, ["train", "toy.toml"], Path("my data"), 2)
    wanted = "Go on with: monoblock train toy.toml --resume --out runs/toy --data 'my data' --nproc 2\n"
    assert capsys.readouterr().err.endswith(wanted)


def test_an_existing_run_is_left_alone(desk, capsys):
    assert run(["train", "toy.toml"]) == 0
    before = {path: path.read_bytes() for path in (desk / "runs").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(["train", "toy.toml"]) == 2
    assert (
        capsys.readouterr().err == "error: runs/toy is there already; go on with --resume, or name another with --out\n"
    )
    assert {path: path.read_bytes() for path in (desk / "runs").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("word", "what"), [("model.depth=2", "model"), ("train.lr=1", "training recipe")])
def test_going_on_with_something_else_is_refused(word, what, capsys):
    assert run(["train", "toy.toml"]) == 0
    assert run(["train", "toy.toml", "train.steps=5", word, "--resume"]) == 1
    assert f"this run was started with another {what}" in capsys.readouterr().err


def test_going_on_with_another_tokenizer_is_refused(desk, capsys):
    assert run(["train", "toy.toml"]) == 0
    Tokenizer.train("bpe", ["another text altogether " * 9], 270, specials="none").save_pretrained(desk / "runs/toy")
    assert run(["train", "toy.toml", "train.steps=5", "--resume"]) == 1
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
