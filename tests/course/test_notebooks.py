"""Every notebook of the course runs, and its file is in order: questions, exercises, outputs, no traces of a run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [sys.executable, str(FOLDER / "execute.py"), "--one", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": 600}
    result = subprocess.run(command, cwd=tmp_path, env=environment, **options)
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
