"""What a model, a tokenizer or a file says cannot take over the terminal that shows it."""

import ast
import io
import json
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import click
import pytest
import torch

import monoblock as mb
from monoblock.cli import output
from monoblock.cli.main import run
from monoblock.runs.progress import TrainingProgress
from monoblock.training.events import SampleEvent

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"  # sets the title, clears the screen, turns red, goes back to the margin
SHOWN = "<1B>]0;owned<07><1B>[2J<9B>31m<0D>"
TOKEN = EVIL.removesuffix("\r")
CONTROLS = {"\x1b", "\x07", "\x7f", "\x9b", "\r"}
CLI = Path(output.__file__).parent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def terminals():
    """Put a terminal on standard output, and one on standard error."""
    with redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err:
        yield out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that says nothing but escapes, with a tokenizer that has them as a token."""
    folder = tmp_path_factory.mktemp("evil")
    tokenizer = mb.Tokenizer.train("word", [f"{TOKEN} a\n"], 20, specials=["pad", "eos"])
    model = mb.Transformer(mb.gpt(vocab=tokenizer.vocab_size, width=8, depth=1, heads=2, context=23))
    with torch.no_grad():  # whatever it reads, the token with escapes is the most probable
        model.decoder.norm.weight.zero_()
        model.decoder.norm.bias.fill_(1)
        model.input.token.weight[tokenizer.id(TOKEN)] = 5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_control_characters_are_shown_on_a_terminal():
    with terminals() as (out, err):
        output.echo(EVIL, fg="black")
        output.echo(EVIL, err=True)
        output.print_table(("a", "b"), [(EVIL, 1)])
    assert out.getvalue().startswith(f"\x1b[30m{SHOWN}\x1b[0m\n")
    assert err.getvalue() == f"{SHOWN}\n"
    assert not set(click.unstyle(out.getvalue())) & CONTROLS
    assert SHOWN in click.unstyle(out.getvalue()).splitlines()[-1]


def test_a_pipe_gets_the_text_as_it_is(capsys):
    output.echo(EVIL)
    assert capsys.readouterr().out == f"{EVIL}\n"


@pytest.mark.parametrize("arguments", [["tokenizer", "show"], ["generate"]])
def test_a_verb_shows_the_escapes_of_a_token(folder, arguments):
    with terminals() as (out, err):
        assert run([*arguments, str(folder), f"{TOKEN} a"]) == 0
    assert SHOWN.removesuffix("<0D>") in click.unstyle(out.getvalue())
    assert not set(click.unstyle(out.getvalue()) + err.getvalue()) & CONTROLS


def test_chat_shows_the_escapes_that_a_model_says(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with terminals() as (out, err):
        assert run(["chat", str(folder)]) == 0
    assert SHOWN.removesuffix("<0D>") in out.getvalue()
    assert not set(out.getvalue() + err.getvalue()) & CONTROLS


def test_json_escapes_control_characters_of_every_kind(folder, capsys):
    assert run(["tokenizer", "show", str(folder), f"{TOKEN} a", "--json"]) == 0
    text = capsys.readouterr().out
    assert not set(text) & CONTROLS
    assert json.loads(text)["pieces"][0]["piece"] == TOKEN
    value = {"é": "".join(map(chr, range(0x20))) + "\x7f\x80\x9f\u2028\u2029é中"}
    assert json.loads(output.dump_json(value)) == value
    assert output.dump_json(value).isprintable()
    assert "é中" in output.dump_json(value)


def test_a_sample_of_a_training_run_is_shown():
    with terminals() as (_, err), TrainingProgress(5) as progress:
        progress.handle_event(SampleEvent(3, f"a{EVIL}b"))
    assert f"step 3: sample: a{SHOWN}b" in err.getvalue()


def test_an_error_has_no_control_characters():
    with terminals() as (_, err):
        assert run(["tokenizer", "show", f"no{EVIL}folder"]) != 0
    assert not set(err.getvalue()) & CONTROLS


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: str(path.relative_to(CLI)))
def test_only_the_shared_output_writes_to_the_terminal(path):
    if path == Path(output.__file__):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write", "json.dump"}
