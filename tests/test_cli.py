"""The command line: exit codes, one-line errors, lazy verbs, numbers for humans."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest

from monoblock.cli import common, env, ls, main
from monoblock.cli.main import VERBS, run
from monoblock.errors import ConfigError, FileError
from monoblock.presets import PRESETS

WORDS_TO_IMPORT = ("torch", "numpy", "rich")


@pytest.fixture
def verb(monkeypatch):
    """Put a function in the place of `monoblock probe`."""

    def put(function):
        module = SimpleNamespace(command=click.command("probe")(function))
        monkeypatch.setitem(VERBS, "probe", ("tests.probe", "A verb of the tests."))
        monkeypatch.setattr(main, "import_module", lambda name: module)

    return put


def raising(error):
    def function():
        raise error

    return function


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


# Starting


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["nonsense"], []])
def test_whatever_needs_no_verb_imports_nothing_heavy(words):
    code = f"""
import sys
from monoblock.cli.main import run
run({words!r})
found = [name for name in {WORDS_TO_IMPORT!r} if name in sys.modules]
assert not found, found
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_verb_without_importing_it(capsys):
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in VERBS)


def test_no_words_at_all_shows_the_help(capsys):
    assert run([]) == 0
    assert "Usage: monoblock" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_command_that_explains_itself(verb, capsys):
    assert run([verb, "--help"]) == 0
    assert f"Usage: monoblock {verb}" in capsys.readouterr().out


def test_the_module_and_the_function_are_one_command():
    done = python("-m", "monoblock", "--version")
    assert (done.returncode, done.stdout) == (0, f"monoblock {main.__version__}\n")


# Failing


def test_an_unknown_verb_is_usage_and_guesses(capsys):
    assert run(["acount"]) == 2
    assert capsys.readouterr().err == "error: no verb 'acount'; did you mean 'account'? (see monoblock --help)\n"


def test_an_unknown_option_is_usage_and_names_where_to_look(capsys):
    assert run(["env", "--jsn"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "--jsn" in said
    assert "(see monoblock env --help)" in said


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ConfigError("heads=3 does not divide width=8; try heads=4"),
            2,
            "heads=3 does not divide width=8; try heads=4",
        ),
        (FileError("runs/x is no model folder"), 1, "runs/x is no model folder"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 1, "a.txt: No such file or directory"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (--debug shows where)"),
        (RuntimeError("two\n  lines"), 1, "RuntimeError: two lines (--debug shows where)"),
        (EOFError(), 1, "the input ended before it was complete (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_and_a_code(verb, capsys, error, code, line):
    verb(raising(error))
    assert run(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip("\n") == f"error: {line}"


@pytest.mark.parametrize("words", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(verb, capsys, words):
    verb(raising(FileError("no")))
    assert run(words) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_after_a_bare_double_dash_is_a_word_like_any_other():
    assert main._take_debug(["probe", "--", "--debug"]) == (["probe", "--", "--debug"], False)
    assert main._take_debug(["probe", "--debug", "--", "x"]) == (["probe", "--", "x"], True)


def test_a_verb_may_exit_with_a_code_of_its_own(verb):
    verb(lambda: click.get_current_context().exit(3))
    assert run(["probe"]) == 3


def test_a_reader_that_leaves_early_is_answered_with_silence():
    code = "import sys\nfrom monoblock.cli.main import run\nsys.exit(run(['--help']))"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


# Verbs


def test_ls_lists_every_preset_without_torch():
    code = """
import sys
from monoblock.cli.main import run
code = run(["ls", "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    presets = {row["name"]: row for row in json.loads(done.stdout)["presets"]}
    assert presets["gpt2"]["parameters"] == 124_439_808
    assert presets["gpt2"]["family"] == "decoder-only"


def test_ls_shows_each_preset_on_one_line_and_names_the_next_verb(capsys):
    assert run(["ls", "presets"]) == 0
    out, err = capsys.readouterr()
    assert any(line.startswith("gpt2 ") and "124,439,808" in line for line in out.splitlines())
    assert err.startswith("Try: monoblock account ")


def test_ls_of_something_else_is_usage_and_guesses(capsys):
    assert run(["ls", "preset"]) == 2
    assert "did you mean 'presets'?" in capsys.readouterr().err


def test_ls_marks_the_presets_of_which_a_value_is_unverified(capsys):
    assert run(["ls", "presets"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "unverified"
    noted = {
        line.split()[0] for line in lines if any(row.unverified and row.unverified in line for row in PRESETS.values())
    }
    assert noted == {name for name, row in PRESETS.items() if row.unverified} != set()


def test_the_help_of_ls_names_everything_it_lists(capsys):
    assert run(["ls", "--help"]) == 0
    own = capsys.readouterr().out
    assert run(["--help"]) == 0
    whole = capsys.readouterr().out
    for what in ls.SECTIONS:
        assert what in own
        assert what in whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2", "width=abc"], "width='abc' cannot be: it is a whole number"),
        (["gpt2", "depth=1000000000"], "depth=1000000000 is deeper than any stack"),
        (["gpt2", "width=10000000001"], "heads=12 does not divide width=10000000001; try heads=1"),
        (["gpt2", "--length", "99999"], "length=99999 is longer than the 1024 places learned"),
        (["gpt2", "--target-length", "5"], "target_length=5 is for an encoder-decoder"),
        (["gpt2", "--tokens", "5", "--mfu", "0"], "mfu=0 cannot be"),
        (["gpt2", "--mfu", "0.5"], "--mfu 0.5 says nothing without --tokens"),
        (["gpt2", "--peak-tflops", "5"], "--peak-tflops 5.0 says nothing without --tokens"),
        (["gpt2", "--prompt", "3"], "--prompt 3 says nothing without --new; give both or neither"),
        (["gpt2", "--beams", "3"], "--beams 3 says nothing without --new"),
        (["gpt2", "--new", "9", "--prompt", "99999"], "is longer than the 1024 places learned"),
        ([""], "'' names nothing; give a preset"),
        (["gpt-2"], "there is no preset 'gpt-2'; did you mean 'gpt2'?"),
    ],
)
def test_account_answers_what_cannot_be_asked_as_usage_in_one_line(words, said, capsys):
    assert run(["account", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("name", ["nope.json", "no/such/folder"])
def test_account_of_a_path_that_is_not_there_says_so(name, tmp_path, capsys):
    assert run(["account", str(tmp_path / name)]) == 1
    assert f"there is no file or folder {tmp_path / name}" in capsys.readouterr().err


def test_account_of_a_folder_without_a_configuration_says_so(tmp_path, capsys):
    assert run(["account", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no config.json" in capsys.readouterr().err


def test_account_writes_with_a_prompt_and_beams_when_asked(capsys):
    assert run(["account", "gpt2", "--new", "5", "--prompt", "3", "--beams", "2", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["decoding"]
    assert ways["greedy, cache"]["positions"] == 3 + 4
    assert ways["2 beams, cache"]["positions"] == 3 + 2 * 4


@pytest.mark.parametrize("under", ["", "deeper"])
def test_the_demo_says_where_it_cannot_write_before_it_works(under, tmp_path, capsys):
    file = tmp_path / "afile"
    file.write_text("taken")
    assert run(["demo", "--out", str(file / under)]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(file) in err


def test_env_gives_versions_devices_and_reasons(capsys):
    assert run(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["devices"][-1]["device"] == "cpu"
    assert all(choice["value"] and choice["why"] for choice in found["chosen"].values())


def test_env_in_words_says_the_same(capsys):
    assert run(["env"]) == 0
    out, err = capsys.readouterr()
    assert "float32" in out or "bfloat16" in out
    assert err == "Try: monoblock demo\n"


def test_env_calls_a_package_that_is_missing_missing():
    assert env._version("no-such-package-anywhere") is None


# Numbers and tables


@pytest.mark.parametrize(
    ("number", "said"),
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
def test_counts_have_three_significant_digits(number, said):
    assert common.human_count(number) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (1_536, "1.50 KiB"),
        (1_048_575, "1.00 MiB"),
        (13 * 2**30, "13.0 GiB"),
    ],
)
def test_bytes_are_in_powers_of_1024(number, said):
    assert common.human_bytes(number) == said


def test_a_table_in_a_pipe_keeps_each_row_on_one_line(capsys):
    long = "a source with [brackets] " * 20
    common.table(
        ("name", "parameters", "share", "source"), [("gpt2", 124_439_808, 0.25, long), ("none", None, None, "")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["gpt2", "124,439,808", "0.25"]
    assert long.strip() in lines[1]


def test_a_narrow_terminal_folds_words_and_never_a_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    common.table(("name", "parameters", "source"), [("gpt2", 124_439_808, "Radford and others, in the year 2019")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert sum("124,439,808" in line for line in lines) == 1


def test_account_measures_a_pass_by_component_when_asked():
    words = ["account", "gpt-tiny", "depth=2", "--length", "16", "--measure", "--json"]
    done = subprocess.run([sys.executable, "-m", "monoblock", *words], capture_output=True, text=True, check=True)
    parts = json.loads(done.stdout)["measured"]["parts"]
    assert {"input", "decoder.attention", "decoder.feedforward", "decoder.norm", "head", "rest", "total"} <= set(parts)
    assert all(part["seconds"] > 0 for name, part in parts.items() if name != "rest")
