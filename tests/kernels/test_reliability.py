"""Small forms of benchmarks/reliability: random wrong arguments of the operators, and threads that share a model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import monoblock as mb
from monoblock.kernels.cpu import library

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "reliability"
TIMEOUT = 600  # seconds for what takes about ten, so that a hang fails


def run_script(name, *words):
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)
    environment = os.environ | {"PYTHONPATH": str(Path(mb.__file__).parents[1])}
    command = [sys.executable, str(SCRIPTS / name), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_random_wrong_arguments_of_the_operators_are_refused_and_crash_nothing():
    result = run_script("operators.py", "--calls", "150", "--seed", "1")
    assert (result["crashed"], result["refused"] + result["accepted"]) == (0, 150)
    assert result["refused"] > 75


@pytest.mark.slow
def test_eight_threads_that_share_a_model_get_the_texts_they_get_alone():
    assert run_script("threads.py", "--runs", "4") == {"runs": 4, "threads": 8, "equal": 4, "failed": 0}
