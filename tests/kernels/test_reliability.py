"""Small forms of benchmarks/reliability: random wrong arguments of the operators, and threads that share a model."""

import json
from pathlib import Path

import processes
import pytest

import monoblock as mb
from monoblock.kernels.cpu import library

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "reliability"
TIMEOUT = 600  # seconds for what takes about ten, so that a hang fails


def run_script(name, *words):
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)
    source = str(Path(mb.__file__).parents[1])  # of the processes that the script starts
    done = processes.run_script(SCRIPTS / name, *words, environment={"PYTHONPATH": source}, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_random_wrong_arguments_of_the_operators_are_refused_and_crash_nothing():
    result = run_script("operators.py", "--calls", "150", "--seed", "1")
    assert (result["crashed"], result["refused"] + result["accepted"]) == (0, 150)
    assert result["refused"] > 75


@pytest.mark.slow
def test_eight_threads_that_share_a_model_get_the_texts_they_get_alone():
    assert run_script("threads.py", "--runs", "4") == {"runs": 4, "threads": 8, "equal": 4, "failed": 0}
