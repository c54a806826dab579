"""Every notebook of the course runs, and its file is in order: questions, exercises, outputs, no traces of a run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_script

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.ipynb"))
QUICK = ("01", "04")  # run by scripts/test too; the others are slow
MAX_BYTES = 400_000

cases = [
    pytest.param(path, id=path.stem, marks=() if path.name.startswith(QUICK) else pytest.mark.slow)
    for path in NOTEBOOKS
]


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def text_of(cell):
    return "".join(cell["source"])


def test_there_are_twelve_notebooks_numbered_from_1():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 13)]


@pytest.mark.parametrize("path", cases)
def test_every_cell_runs(path, tmp_path):
    result = run_script(FOLDER / "execute.py", "--one", path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_questions_and_ends_with_two_solved_exercises(path):
    cells = load(path)
    first = text_of(cells[0])
    assert first.startswith(f"# {path.name[:2]} ")
    assert first.count("\n- ") >= 3
    exercises = next(text_of(cell) for cell in cells if "## Exercises" in text_of(cell))
    assert re.findall(r"^\*\*(\d)\.\*\*", exercises, re.MULTILINE) == ["1", "2"]
    solutions = [cell for cell in cells if "solution" in cell["metadata"].get("tags", ())]
    assert len(solutions) == 2
    assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
    assert any("assert " in text_of(cell) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_without_errors_and_traces_of_the_run(path):
    content = path.read_text(encoding="utf-8")
    assert len(content) < MAX_BYTES
    assert not re.search(r"/(tmp|home|root|work)/", content)
    notebook = json.loads(content)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert [cell["id"] for cell in cells] == [f"{path.name[:2]}-{number:02}" for number in range(len(cells))]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert all("execution" not in cell["metadata"] for cell in cells)


def test_a_failing_cell_is_reported_with_the_number_of_its_cell(tmp_path):
    cells = [{"cell_type": "code", "source": ["x = 1"]}, {"cell_type": "code", "source": ["assert x == 2"]}]
    path = tmp_path / "00_wrong.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    command = [sys.executable, str(FOLDER / "execute.py"), "--one", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1
    assert "00_wrong.ipynb, cell 1" in result.stderr
    assert "AssertionError" in result.stderr


def test_a_wrong_name_is_a_one_line_error():
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    assert [path.name[:2] for path in execute.find_notebooks(["03", "1"])] == ["03", "10", "11", "12"]
    with pytest.raises(SystemExit, match="no notebook starts with '99'"):
        execute.find_notebooks(["99"])


def test_notebook_05_trains_on_tiny_shakespeare_where_a_data_folder_has_it(tmp_path, monkeypatch):
    file = tmp_path / "tinyshakespeare/input.txt"
    file.parent.mkdir()
    file.write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n" * 17)
    path = next(path for path in NOTEBOOKS if path.name.startswith("05"))
    cell = next(text_of(cell) for cell in load(path) if "load_corpus(" in text_of(cell) and cell["cell_type"] == "code")
    for folder, corpus, start in ((None, "kjv", "In the beginning"), (tmp_path, "shakespeare", "First Citizen:")):
        monkeypatch.setenv("HOME", str(tmp_path))  # where downloads are kept
        monkeypatch.delenv("MONOBLOCK_DATA", raising=False)
        if folder is not None:
            monkeypatch.setenv("MONOBLOCK_DATA", str(folder))
        names = {"os": os}
        exec(cell, names)
        assert names["CORPUS"] == corpus
        assert names["text"].startswith(start)
    training = next(
        text_of(cell) for cell in load(path) if "mb.train(" in text_of(cell) and cell["cell_type"] == "code"
    )
    assert '{"corpus": CORPUS}' in training
    assert "data=FOLDER" in training


def test_the_page_of_the_course_names_the_notebooks_that_train_models():
    page = (ROOT / "docs/course.md").read_text(encoding="utf-8")
    named = re.search(r"Notebooks (.+?) train", page)[1]
    training = [
        path.name[:2]
        for path in NOTEBOOKS
        if any(re.search(r"optimizer\.step\(|mb\.train\(", text_of(c)) for c in load(path))
    ]
    assert re.findall(r"\d\d", named) == training


@pytest.mark.parametrize(
    ("number", "heading", "printed"),
    [
        ("06", "## Back-translation", r"… and the most probable English\s+\d"),
        ("08", "## Unwanted splits", r"नाराज़: _ना राज़\n"),
        ("08", "## Unwanted splits", r"notable +not \+ able\n"),
        (
            "09",
            "## Exhaustive search",
            r"exhaustive: cd 0\.225, .*\n1 beam\(s\):  aa .*\n2 beam\(s\):  ba .*\n3 beam\(s\):  cd 0\.225",
        ),
        ("09", "## Exhaustive search", r"8 beam\(s\): the best of 54,872 texts in \d+ of \d+ cases"),
    ],
)
def test_a_notebook_has_a_section_and_prints_its_result(number, heading, printed):
    cells = load(next(path for path in NOTEBOOKS if path.name.startswith(number)))
    titles = [re.match("(## )?.+", text_of(cell))[0] for cell in cells]
    begin = titles.index(heading)
    end = next((i for i in range(begin + 1, len(cells)) if text_of(cells[i]).startswith("## ")), len(cells))
    outputs = [output for cell in cells[begin:end] for output in cell.get("outputs", ())]
    assert re.search(printed, "".join("".join(output.get("text", "")) for output in outputs))
    assert any("image/png" in output.get("data", {}) for output in outputs)
