"""`monoblock data`: prepare token shards, show and verify them."""

import json

import pytest

from monoblock.data import prepare
from monoblock.tokenizers.tokenizer import Tokenizer

TEXT = "In the beginning was the word.\n" * 200


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT[:90]}"}) + "\n" for n in range(300)))
    Tokenizer.train("bpe", [TEXT], 280).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "a.jsonl"


def test_prepare_and_show(text, tmp_path, run_verb):
    words = ["data", "prepare", text, "--out", tmp_path / "t", "--tokenizer", tmp_path / "tokenizer", "--jobs", 1]
    code, out, err = run_verb(words)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["split", "train", "valid", "Saved"]
    assert f"train gpt-tiny data.corpus={tmp_path / 't'}" in err
    code, out, _ = run_verb(words)
    assert (code, out.splitlines()[0]) == (0, f"{tmp_path / 't'} is already complete")
    code, out, _ = run_verb(["data", "show", tmp_path / "t", "--verify", "--json"])
    shown = json.loads(out)
    assert shown["verified"]
    assert shown["splits"]["train"]["documents"] + shown["splits"]["valid"]["documents"] == 300
    assert shown["first_text"].startswith("0 In the beginning")
    code, out, _ = run_verb(["data", "show", tmp_path / "t", "--verify"])
    assert "All files have the SHA-256 of the manifest." in out


def test_a_new_tokenizer_and_json(text, tmp_path, run_verb):
    words = ["data", "prepare", text, "--out", tmp_path / "t", "--vocab", 270, "--jobs", 1, "--validation", 0, "--json"]
    code, out, err = run_verb(words)
    assert (code, json.loads(out)["vocab"]) == (0, 270)
    assert list(json.loads(out)["splits"]) == ["train"]
    assert "Training a bpe tokenizer" in err


def test_an_interruption_is_exit_130_and_the_next_run_goes_on(text, tmp_path, run_verb, monkeypatch):
    monkeypatch.setattr(prepare, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(prepare, "PART_BYTES", 1000)
    words = ["data", "prepare", text, "--out", tmp_path / "t", "--tokenizer", tmp_path / "tokenizer", "--jobs", 1]
    with monkeypatch.context() as patch:
        patch.setattr("monoblock.cli.data.ProgressBar.__call__", interrupt)
        code, _, err = run_verb(words)
        assert (code, err.strip()) == (130, "error: interrupted")
    code, _, err = run_verb(["data", "show", tmp_path / "t"])
    assert (code, err.count("\n")) == (1, 1)
    assert "run the same `monoblock data prepare` again" in err
    assert run_verb(words)[0] == 0


def interrupt(self, count):
    raise KeyboardInterrupt


def test_a_damaged_shard_is_one_line_that_names_it(text, tmp_path, run_verb):
    run_verb(["data", "prepare", text, "--out", tmp_path / "t", "--tokenizer", tmp_path / "tokenizer", "--jobs", 1])
    shard = tmp_path / "t/train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 1
    shard.write_bytes(raw)
    assert run_verb(["data", "show", tmp_path / "t"])[0] == 0
    code, _, err = run_verb(["data", "show", tmp_path / "t", "--verify"])
    assert (code, err.count("\n")) == (1, 1)
    assert "train-00000.bin is damaged" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "x", "--vocab", "300"], "leave them out, or leave out --tokenizer"),
        (["--validation", "1"], "validation"),
        (["--jobs", "0"], "jobs"),
        (["--kind", "bpee"], "did you mean 'bpe'"),
        (["--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(text, tmp_path, run_verb, words, message):
    code, _, err = run_verb(["data", "prepare", text, "--out", tmp_path / "t", *words])
    assert code in (1, 2)
    assert message in err
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert not list(tmp_path.glob("t/*.json"))


def test_the_group_alone_shows_its_help(run_verb):
    code, out, _ = run_verb(["data"])
    assert code == 0
    assert "prepare" in out
    assert "show" in out
