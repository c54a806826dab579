"""`monoblock tokenizer`: train, show, and their errors."""

import io
import json
import subprocess
import sys

import pytest

from monoblock.cli.main import run

TEXT = "In the beginning God created the heaven and the earth.\n" * 5


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def train_tokenizer(workspace, *arguments):
    assert (
        run(
            [
                "tokenizer",
                "train",
                str(workspace / "book.txt"),
                "--out",
                str(workspace / "t"),
                "--vocab",
                "300",
                *arguments,
            ]
        )
        == 0
    )
    return str(workspace / "t")


def test_help_imports_neither_torch_nor_tokenizers():
    code = """
import sys
from monoblock.cli.main import run
for words in ([], ["--help"], ["train", "--help"], ["show", "--help"]):
    assert run(["tokenizer", *words]) == 0
loaded = [name for name in ("torch", "tokenizers", "numpy") if name in sys.modules]
assert not loaded, loaded
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_train_then_show(workspace, capsys):
    folder = train_tokenizer(workspace)
    out, err = capsys.readouterr()
    assert out.startswith(f"Saved {folder}: bpe, 293 tokens, ")
    assert err == f"Try: monoblock tokenizer show {folder} 'In the beginning'\n"
    assert run(["tokenizer", "show", folder, "the é"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the| |<C3>|<A9>"
    assert len(lines[1].split()) == 4
    assert lines[2] == "4 pieces, 5 characters, 1.25 characters per piece"


def test_show_without_a_text_describes_the_tokenizer(workspace, capsys):
    folder = train_tokenizer(workspace, "--kind", "wordpiece", "--specials", "pad,mask,<2hi>")
    capsys.readouterr()
    assert run(["tokenizer", "show", folder]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "wordpiece,",
        "role",
        "pad",
        "unk",
        "mask",
    ]


def test_json_gives_every_piece(workspace, capsys):
    folder = train_tokenizer(workspace, "--kind", "bpe", "--marker", "@@", "--vocab", "40", "--json")
    assert json.loads(capsys.readouterr().out)["folder"] == folder
    assert run(["tokenizer", "show", folder, "godly", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "".join(piece["text"] for piece in report["pieces"]) == "godly"
    assert report["characters"] == 5


def test_pieces_are_coloured_on_a_terminal(workspace, capsys, monkeypatch):
    folder = train_tokenizer(workspace)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    capsys.readouterr()
    styled = []
    monkeypatch.setattr("click.style", lambda text, **style: styled.append((text, style["bg"])) or text)
    assert run(["tokenizer", "show", folder, "the heaven"]) == 0
    assert [text for text, _ in styled] == ["the", " heaven"]
    assert styled[0][1] != styled[1][1]


def test_a_dash_reads_standard_input(workspace, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert run(["tokenizer", "train", "-", "--kind", "char", "--out", str(workspace / "t")]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("the"))
    capsys.readouterr()
    assert run(["tokenizer", "show", str(workspace / "t"), "-"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "t|h|e"


def test_an_existing_folder_is_not_overwritten_without_force(workspace, capsys):
    (workspace / "t").mkdir()
    arguments = ["tokenizer", "train", str(workspace / "book.txt"), "--out", str(workspace / "t")]
    assert run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list((workspace / "t").iterdir()) == []
    assert run([*arguments, "--force"]) == 0
    assert (workspace / "t" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "none.txt", "--out", "t"], 1, "none.txt cannot be read: No such file or directory"),
        (["train", "bad.txt", "--out", "t"], 1, "bad.txt is not UTF-8 text (see byte 1)"),
        (["train", "empty.txt", "--out", "t"], 1, "there is no text to train on"),
        (["train", "empty.txt", "--kind", "bpee", "--out", "t"], 2, "did you mean 'bpe'?"),
        (["train"], 2, "Missing argument 'DATA...'"),
        (["show", "none"], 1, "none holds no tokenizer"),
        (["shw"], 2, "No such command 'shw'"),
    ],
)
def test_invalid_arguments_are_one_line_errors(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert run(["tokenizer", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "t").exists()
