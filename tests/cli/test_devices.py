"""Devices and pipes, which may never end, where a text is expected: one line at once, and no memory."""

import os
import sys
from pathlib import Path

import pytest
import torch

from monoblock import untrusted_files
from monoblock.cli.main import run
from monoblock.cli.text import read_lines
from monoblock.errors import FileError

RECIPE = """
[data]
corpus = "book.txt"
[tokenizer]
kind = "char"
[model]
family = "gpt"
width = 6
depth = 2
heads = 3
context = 11
[train]
steps = 1
batch = 5
device = "cpu"
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a trained model, links to devices and a pipe."""
    folder = tmp_path_factory.mktemp("devices")
    (folder / "book.txt").write_text("And the king went up to the house.\n" * 50)
    (folder / "toy.toml").write_text(RECIPE)
    for suffix in ("txt", "tsv", "csv", "jsonl", "json", "npz", "conll"):
        (folder / f"zero.{suffix}").symlink_to("/dev/zero")
        os.mkfifo(folder / f"pipe.{suffix}")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["train", "toy.toml", "--out", "model"]) == 0
        yield folder
    finally:
        os.chdir(before)
        torch.use_deterministic_algorithms(False)


COMMANDS = {
    "tokenizer": ["tokenizer", "train", "TEXT", "--out", "t", "--force"],
    "train": ["train", "toy.toml", "data.corpus=TEXT", "--out", "other"],
    "evaluate": ["evaluate", "model", "TEXT"],
    "prepare": ["data", "prepare", "TEXT", "--tokenizer", "model", "--out", "tokens"],
    "prune": ["prune", "model", "TEXT", "--remove", "1", "--out", "pruned"],
    "quantize": ["quantize", "model", "--text", "TEXT", "--out", "small"],
    "backtranslate": ["backtranslate", "model", "TEXT", "--out", "pairs.tsv"],
    "compare": ["compare", "norm-placement", "--table", "--results", "TEXT", "--out", "compared"],
}


@pytest.mark.parametrize("text", ["/dev/zero", "zero.txt", "pipe.txt"])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_device_or_pipe_in_place_of_a_text_is_one_line(words, text, workspace, capsys):
    assert run([word.replace("TEXT", text) for word in words]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert text in errors[0]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "json", "npz", "conll"])
@pytest.mark.parametrize("kind", ["zero", "pipe"])
def test_no_reader_of_a_corpus_opens_a_device_or_pipe(kind, suffix, workspace, capsys):
    assert run(["train", "toy.toml", f"data.corpus={kind}.{suffix}", "--out", "other"]) in (1, 2)
    assert f"{kind}.{suffix}" in capsys.readouterr().err


STANDARD_INPUT = {
    "tokenizer": ["tokenizer", "train", "-", "--out", "t", "--force"],
    "show": ["tokenizer", "show", "model", "-"],
    "generate": ["generate", "model", "-"],
    "prepare": ["data", "prepare", "-", "--tokenizer", "model", "--out", "tokens"],
    "backtranslate": ["backtranslate", "model", "-", "--out", "pairs.tsv"],
}


@pytest.mark.parametrize("words", STANDARD_INPUT.values(), ids=STANDARD_INPUT)
def test_standard_input_from_a_device_is_one_line(words, workspace, monkeypatch, capsys):
    with open("/dev/zero") as device:
        monkeypatch.setattr(sys, "stdin", device)
        assert run(words) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_an_endless_line_is_read_up_to_a_bound(workspace, monkeypatch):
    monkeypatch.setattr(untrusted_files, "MAX_LINE_BYTES", 1000)
    with pytest.raises(FileError, match="line of more than"):
        list(read_lines(file=Path("/dev/zero")))
    Path("long.txt").write_bytes(b"short\n" + b"a" * 1000 + b"\nshort\n")
    with pytest.raises(FileError, match="line of more than"):
        list(read_lines(file=Path("long.txt")))
    Path("long.txt").write_bytes(b"short\n" + b"a" * 999 + b"\nshort\n")
    assert list(read_lines(file=Path("long.txt"))) == ["short", "a" * 999, "short"]
