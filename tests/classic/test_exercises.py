"""The code of every exercise in docs/exercises.md runs, and it prints and draws what the page shows.

To draw the pictures anew, run the code of an exercise in docs/pictures.
"""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S))
NUMBERS = [f"8.{n}" for n in range(1, 11)] + [f"A{n}" for n in range(1, 7)] + ["D1", "D2", "D3"]
NUMBERS += [f"Q{n}" for n in range(1, 6)]


def test_no_exercise_is_missing_and_each_has_an_assertion():
    assert [title.split()[0] for title in SECTIONS] == NUMBERS
    assert all(
        re.search(r"```python\n.*?^\s*assert |testing\.assert", text, flags=re.M | re.S) for text in SECTIONS.values()
    )


def code_blocks(title):
    """Return the blocks of code of a section, each with the block of text that follows at once: what it prints."""
    return re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", SECTIONS[title], flags=re.S)


def run_code(code, title):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/exercises.md, {title}", "exec"), {})
    return printed.getvalue()


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"), dtype=float)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_code_of_an_exercise_runs_and_prints_and_draws_what_the_page_shows(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, shown in code_blocks(title):
        if not code.startswith("# Slow"):
            assert run_code(code, title) == shown
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == re.findall(r"!\[.+\]\(pictures/(.+)\)", SECTIONS[title])
    for name in drawn:
        new, old = pixels(name), pixels(ROOT / "docs/pictures" / name)
        assert new.shape == old.shape
        assert np.abs(new - old).mean() < 1  # of 255


def test_the_figures_of_exercise_8_9_are_those_of_the_benchmark():
    title = next(title for title in SECTIONS if title.startswith("8.9"))
    measured = (ROOT / "benchmarks/results/exercise-8-9.md").read_text(encoding="utf-8")
    rows = [line for line in SECTIONS[title].splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert set(rows) <= set(measured.splitlines())
    transformer, lstm = ([float(cell.replace(",", "")) for cell in row.split("|")[2:-1]] for row in rows[2:])
    _, _, perplexity, validation, milliseconds = zip(transformer, lstm, strict=True)
    assert perplexity[0] < perplexity[1]
    assert milliseconds[0] < milliseconds[1]
    assert all(valid < train for valid, train in zip(validation, perplexity, strict=True))
    texts = re.search(r"^```text\n(.+?)\n\n(.+?)\n```", SECTIONS[title], flags=re.M)
    assert re.findall(r"```text\n(.+)\n```", measured) == list(texts.groups())


def test_the_slow_code_is_that_of_exercise_8_9_and_prints_the_training_perplexity():
    slow = [(title, code) for title in SECTIONS for code, _ in code_blocks(title) if code.startswith("# Slow")]
    assert [title[:3] for title, _ in slow] == ["8.9"]
    assert "training perplexity" in slow[0][1]


@pytest.mark.slow
def test_the_slow_code_of_the_exercises_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for title in SECTIONS:
        for code, _ in code_blocks(title):
            if code.startswith("# Slow"):
                perplexities = re.findall(r"training perplexity ([\d.]+), ", run_code(code, title))
                assert len(perplexities) == 2
