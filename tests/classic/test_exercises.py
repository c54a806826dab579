"""The code of every exercise in docs/exercises.md runs, and its assertions hold."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/exercises.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S))
NUMBERS = [f"8.{n}" for n in range(1, 11)] + [f"A{n}" for n in range(1, 7)] + ["D1", "D2", "D3"]
NUMBERS += [f"Q{n}" for n in range(1, 6)]


def test_no_exercise_is_missing_and_each_has_an_assertion():
    assert [title.split()[0] for title in SECTIONS] == NUMBERS
    assert all(
        re.search(r"```python\n.*?^\s*assert |testing\.assert", text, flags=re.M | re.S) for text in SECTIONS.values()
    )


def code_blocks(title):
    return re.findall(r"```python\n(.*?)```", SECTIONS[title], flags=re.S)


def run_code(code, title):
    exec(compile(code, f"docs/exercises.md, {title}", "exec"), {})


@pytest.mark.parametrize("title", SECTIONS)
def test_the_code_of_an_exercise_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in code_blocks(title):
        if not code.startswith("# Slow"):
            run_code(code, title)


@pytest.mark.slow
def test_the_slow_code_of_the_exercises_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = [(code, title) for title in SECTIONS for code in code_blocks(title) if code.startswith("# Slow")]
    assert slow
    for code, title in slow:
        run_code(code, title)
