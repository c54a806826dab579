"""Fixtures for the tests of the command line."""

import io
import sys
from types import SimpleNamespace

import pytest

from monoblock.cli.main import run


@pytest.fixture
def run_verb(monkeypatch, capsys):
    """Run a verb with bytes on standard input; return exit code, stdout and stderr."""

    def run_with_input(arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return run_with_input
