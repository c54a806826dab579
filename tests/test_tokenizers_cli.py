"""`monoblock tokenizer`: train, show, and what it says when it cannot."""

import io
import json
import subprocess
import sys

import pytest

from monoblock.cli.main import run

TEXT = "In the beginning God created the heaven and the earth.\n" * 5


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def trained(book, *words):
    assert run(["tokenizer", "train", str(book / "book.txt"), "--out", str(book / "t"), "--vocab", "300", *words]) == 0
    return str(book / "t")


def test_help_imports_neither_torch_nor_the_library():
    code = """
import sys
from monoblock.cli.main import run
for words in ([], ["--help"], ["train", "--help"], ["show", "--help"]):
    assert run(["tokenizer", *words]) == 0
found = [name for name in ("torch", "tokenizers", "numpy") if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_train_then_show(book, capsys):
    folder = trained(book)
    out, err = capsys.readouterr()
    assert out.startswith(f"Saved {folder}: bpe, 293 tokens, ")
    assert err == f'Try: monoblock tokenizer show {folder} "In the beginning"\n'
    assert run(["tokenizer", "show", folder, "the é"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the| |<C3>|<A9>"
    assert len(lines[1].split()) == 4
    assert lines[2] == "4 pieces, 5 characters, 1.25 characters a piece"


def test_show_without_a_text_describes_the_tokenizer(book, capsys):
    folder = trained(book, "--kind", "wordpiece", "--specials", "pad,mask,<2hi>")
    capsys.readouterr()
    assert run(["tokenizer", "show", folder]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "wordpiece,",
        "role",
        "pad",
        "unk",
        "mask",
    ]


def test_json_gives_every_piece(book, capsys):
    folder = trained(book, "--kind", "bpe", "--marker", "@@", "--vocab", "40", "--json")
    assert json.loads(capsys.readouterr().out)["folder"] == folder
    assert run(["tokenizer", "show", folder, "godly", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "".join(piece["text"] for piece in shown["pieces"]) == "godly"
    assert shown["characters"] == 5


def test_a_terminal_gets_colours(book, capsys, monkeypatch):
    folder = trained(book)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    capsys.readouterr()
    from monoblock.cli import tokenizer as verb

    styled = []
    monkeypatch.setattr(verb.click, "style", lambda text, **looks: styled.append((text, looks["bg"])) or text)
    assert run(["tokenizer", "show", folder, "the heaven"]) == 0
    assert [text for text, _ in styled] == ["the", " heaven"]
    assert styled[0][1] != styled[1][1]


def test_the_standard_input_is_a_file_too(book, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert run(["tokenizer", "train", "-", "--kind", "char", "--out", str(book / "t")]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("the"))
    capsys.readouterr()
    assert run(["tokenizer", "show", str(book / "t"), "-"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "t|h|e"


def test_an_existing_folder_is_left_alone_unless_forced(book, capsys):
    (book / "t").mkdir()
    words = ["tokenizer", "train", str(book / "book.txt"), "--out", str(book / "t")]
    assert run(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list((book / "t").iterdir()) == []
    assert run([*words, "--force"]) == 0
    assert (book / "t" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train", "none.txt", "--out", "t"], 1, "none.txt cannot be read: No such file or directory"),
        (["train", "bad.txt", "--out", "t"], 1, "bad.txt is not UTF-8 text (byte 1)"),
        (["train", "empty.txt", "--out", "t"], 1, "there is no text to train on"),
        (["train", "empty.txt", "--kind", "bpee", "--out", "t"], 2, "did you mean 'bpe'?"),
        (["train"], 2, "Missing argument 'DATA...'"),
        (["show", "none"], 1, "none holds no tokenizer"),
        (["shw"], 2, "No such command 'shw'"),
    ],
)
def test_what_cannot_be_is_one_line(words, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert run(["tokenizer", *words]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "t").exists()
