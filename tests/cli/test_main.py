"""The command line: exit codes, one-line errors, lazy imports, readable numbers."""

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import click
import processes
import pytest

from monoblock.cli import ls, machine, main, output
from monoblock.cli.evaluate import Evaluate
from monoblock.cli.main import VERBS, run
from monoblock.config.presets import PRESETS
from monoblock.errors import ConfigError, FileError
from monoblock.tasks.evaluation_report import EvaluationRequest

HEAVY_MODULES = ("torch", "numpy", "rich")


@pytest.fixture
def verb(monkeypatch):
    """Register a function as `monoblock probe`."""

    def register(function):
        class Probe:
            """A verb for the tests."""

            def run(self):
                return function()

        module = SimpleNamespace(Probe=dataclass(Probe))
        monkeypatch.setitem(VERBS, "probe", ("probe", "A verb for the tests."))
        monkeypatch.setattr(main, "import_module", lambda name: module)

    return register


def raising(error):
    def function():
        raise error

    return function


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, **options)


# -- starting


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], []])
def test_without_a_verb_nothing_heavy_is_imported(arguments):
    code = f"""
import sys
from monoblock.cli.main import run
run({arguments!r})
loaded = [name for name in {HEAVY_MODULES!r} if name in sys.modules]
assert not loaded, loaded
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_help_lists_every_verb_without_importing_it(capsys):
    assert run(["--help"]) == 0
    message = capsys.readouterr().out
    assert all(f"  {verb} " in message for verb in VERBS)


def test_without_arguments_the_help_is_shown(capsys):
    assert run([]) == 0
    assert "Usage: monoblock" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_text(verb, capsys):
    assert run([verb, "--help"]) == 0
    assert f"Usage: monoblock {verb}" in capsys.readouterr().out


def test_python_dash_m_runs_the_same_command():
    result = python("-m", "monoblock", "--version")
    assert (result.returncode, result.stdout) == (0, f"monoblock {main.__version__}\n")


# -- errors


def test_an_unknown_verb_is_a_usage_error_with_a_suggestion(capsys):
    assert run(["acount"]) == 2
    assert (
        capsys.readouterr().err == "error: there is no verb 'acount'; did you mean 'account'? (see monoblock --help)\n"
    )


def test_an_unknown_option_is_a_usage_error_that_names_the_help(capsys):
    assert run(["env", "--jsn"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "--jsn" in message
    assert "(see monoblock env --help)" in message


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("heads=3 does not divide width=8; try heads=4"),
            2,
            "heads=3 does not divide width=8; try heads=4",
        ),
        (FileError("runs/x is not a model folder"), 1, "runs/x is not a model folder"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "a.txt: No such file or directory"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (use --debug for details)"),
        (RuntimeError("two\n  lines"), 1, "RuntimeError: two lines (use --debug for details)"),
        (EOFError(), 1, "unexpected end of input (use --debug for details)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_and_an_exit_code(verb, capsys, error, code, line):
    verb(raising(error))
    assert run(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip("\n") == f"error: {line}"


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback_before_or_after_the_verb(verb, capsys, arguments):
    verb(raising(FileError("no")))
    assert run(arguments) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_after_a_bare_double_dash_is_an_ordinary_argument():
    assert main._extract_debug(["probe", "--", "--debug"]) == (["probe", "--", "--debug"], False)
    assert main._extract_debug(["probe", "--debug", "--", "x"]) == (["probe", "--", "x"], True)


def test_a_verb_may_choose_its_exit_code(verb):
    verb(lambda: click.get_current_context().exit(3))
    assert run(["probe"]) == 3


def test_a_closed_pipe_prints_no_error():
    code = "import sys\nfrom monoblock.cli.main import run\nsys.exit(run(['--help']))"
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=600
        )
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


# -- verbs


def test_ls_lists_every_preset_without_torch():
    code = """
import sys
from monoblock.cli.main import run
code = run(["ls", "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    presets = {row["name"]: row for row in json.loads(result.stdout)["presets"]}
    assert presets["gpt2"]["parameters"] == 124_439_808
    assert presets["gpt2"]["family"] == "decoder-only"


def test_ls_shows_each_preset_on_one_line_and_names_the_next_verb(capsys):
    assert run(["ls", "presets"]) == 0
    out, err = capsys.readouterr()
    assert any(line.startswith("gpt2 ") and "124,439,808" in line for line in out.splitlines())
    assert err.startswith("Try: monoblock account ")


def test_ls_of_something_unknown_is_a_usage_error_with_a_suggestion(capsys):
    assert run(["ls", "preset"]) == 2
    assert "did you mean 'presets'?" in capsys.readouterr().err


def test_ls_marks_presets_with_an_unverified_value(capsys):
    assert run(["ls", "presets"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "unverified"
    marked = {
        line.split()[0] for line in lines if any(row.unverified and row.unverified in line for row in PRESETS.values())
    }
    assert marked == {name for name, row in PRESETS.items() if row.unverified} != set()


def test_the_help_of_ls_names_everything_it_lists(capsys):
    assert run(["ls", "--help"]) == 0
    ls_help = capsys.readouterr().out
    assert run(["--help"]) == 0
    main_help = capsys.readouterr().out
    for name in ls.LISTINGS:
        assert name in ls_help
        assert name in main_help


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2", "width=abc"], "width='abc' is not a positive whole number"),
        (["gpt2", "depth=1000000000"], "depth=1000000000 is too large"),
        (["gpt2", "width=10007"], "heads=12 does not divide width=10007; try heads=1"),
        (["gpt2", "--length", "99999"], "length=99999 is more than the 1024 learned positions"),
        (["gpt2", "--target-length", "5"], "target_length=5 is for an encoder-decoder"),
        (["gpt2", "--tokens", "5", "--mfu", "0"], "mfu=0 is out of range"),
        (["gpt2", "--mfu", "0.5"], "--mfu 0.5 has no effect without --tokens"),
        (["gpt2", "--peak-tflops", "5"], "--peak-tflops 5.0 has no effect without --tokens"),
        (["gpt2", "--prompt", "3"], "--prompt 3 has no effect without --new; give both or neither"),
        (["gpt2", "--beams", "3"], "--beams 3 has no effect without --new"),
        (["gpt2", "--new", "9", "--prompt", "99999"], "is more than the 1024 learned positions"),
        ([""], "WHAT is empty; give the name of a preset"),
        (["gpt-2"], "there is no preset 'gpt-2'; did you mean 'gpt2'?"),
    ],
)
def test_account_reports_invalid_arguments_as_one_line_usage_errors(arguments, message, capsys):
    assert run(["account", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("name", ["nope.json", "no/such/folder"])
def test_account_of_a_missing_path_is_an_error(name, tmp_path, capsys):
    assert run(["account", str(tmp_path / name)]) == 1
    assert f"there is no file or folder {tmp_path / name}" in capsys.readouterr().err


def test_account_of_a_folder_without_a_configuration_is_an_error(tmp_path, capsys):
    assert run(["account", str(tmp_path)]) == 1
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [8, 32])
def test_account_prints_the_peak_of_training_on_one_gpu(batch, capsys):
    """It is that of a GPU, up to a tenth; benchmarks/planned_memory.py measured it."""
    page = (Path(__file__).parents[2] / "benchmarks/results/planned-memory.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| gpt2, 124M \| {batch} × 1024 \|.*$", page.split("## One GPU\n")[1].split("##")[0], re.M)
    measured = int(row.split("|")[4].replace(",", ""))
    arguments = ["account", "gpt2", "--batch", str(batch), "--length", "1024"]
    assert run([*arguments, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["memory"]["peak"]
    assert peak["kept"] / 2**20 == pytest.approx(measured, rel=0.1)
    assert peak["checkpointed"] < peak["selective"] < peak["kept"]
    assert run(arguments) == 0
    assert f"on one GPU: {peak['kept'] / 2**30:#.3g} GiB, selective" in capsys.readouterr().out


def test_account_reports_the_cost_of_decoding_with_a_prompt_and_beams(capsys):
    assert run(["account", "gpt2", "--new", "5", "--prompt", "3", "--beams", "2", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["decoding"]
    assert costs["greedy, cache"]["positions"] == 3 + 4
    assert costs["2 beams, cache"]["positions"] == 3 + 2 * 4


@pytest.mark.parametrize("subfolder", ["", "deeper"])
def test_the_demo_fails_at_once_if_it_cannot_write(subfolder, tmp_path, capsys):
    file = tmp_path / "afile"
    file.write_text("taken")
    assert run(["demo", "--out", str(file / subfolder)]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(file) in err


def test_env_gives_versions_devices_and_reasons(capsys):
    assert run(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"]
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["devices"][-1]["device"] == "cpu"
    assert all(choice["value"] and choice["why"] for choice in report["chosen"].values())


def test_env_prints_the_same_as_text(capsys):
    assert run(["env"]) == 0
    out, err = capsys.readouterr()
    assert "float32" in out or "bfloat16" in out
    assert err == "Try: monoblock demo\n"


def test_env_reports_missing_packages():
    assert machine.package_version("no-such-package-anywhere") is None


# -- numbers and tables


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (65, "65"),
        (999, "999"),
        (1_000, "1.00k"),
        (1_500, "1.50k"),
        (9_996, "10.0k"),
        (99_960, "100k"),
        (999_499, "999k"),
        (999_999, "1.00M"),
        (124_439_808, "124M"),
        (7_241_732_096, "7.24B"),
        (-1_500, "-1.50k"),
        (3.2e23, "320000E"),
        (0.5, "0.5"),
    ],
)
def test_counts_have_three_significant_digits(number, text):
    assert output.format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (1_536, "1.50 KiB"),
        (1_048_575, "1.00 MiB"),
        (13 * 2**30, "13.0 GiB"),
    ],
)
def test_bytes_are_in_powers_of_1024(number, text):
    assert output.format_bytes(number) == text


def test_a_table_in_a_pipe_keeps_each_row_on_one_line(capsys):
    long = "a source with [brackets] " * 20
    output.print_table(
        ("name", "parameters", "share", "source"), [("gpt2", 124_439_808, 0.25, long), ("none", None, None, "")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["gpt2", "124,439,808", "0.25"]
    assert long.strip() in lines[1]


def test_a_narrow_terminal_folds_text_but_never_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.print_table(
        ("name", "parameters", "source"), [("gpt2", 124_439_808, "Radford and others, in the year 2019")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert sum("124,439,808" in line for line in lines) == 1


def test_account_measures_a_forward_pass_by_component():
    arguments = ["account", "gpt-tiny", "depth=2", "--length", "16", "--measure", "--json"]
    result = processes.run(run, arguments)
    assert result.returncode == 0, result.stderr
    parts = json.loads(result.stdout)["measured"]["parts"]
    assert {"input", "decoder.attention", "decoder.feedforward", "decoder.norm", "head", "rest", "total"} <= set(parts)
    assert all(part["seconds"] > 0 for name, part in parts.items() if name != "rest")


def verb_classes():
    """The dataclasses of the verbs, and of the commands of a verb."""
    for name, (file, _) in VERBS.items():
        module = import_module(f"monoblock.cli.{file}")
        commands = getattr(module, "COMMANDS", {}).get(name)
        yield from commands.values() if commands else [getattr(module, name.capitalize())]


@pytest.mark.parametrize("verb_class", tuple(verb_classes()), ids=lambda cls: cls.__name__)
def test_every_option_of_a_verb_is_read(verb_class):
    """As an attribute, or by a name in a string such as "rank alpha", in the modules of the class and its bases.

    `evaluate` hands on its options by the names of the fields of a request.
    """
    read = {field.name for field in dataclasses.fields(EvaluationRequest)} if verb_class is Evaluate else set()
    for module in {inspect.getmodule(cls) for cls in verb_class.__mro__[:-1]}:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.split()
                read.update(words if all(map(str.isidentifier, words)) else ())
    assert {field.name for field in dataclasses.fields(verb_class)} <= read
