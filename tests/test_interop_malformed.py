"""Five hundred files that lie (malformed.py): each one line of one of our errors, nothing run, nothing else read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

SLOWEST = 2.0  # seconds of processor time, so that a busy machine changes nothing
MOST_MEMORY = 256  # MB beyond what reading good files takes


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    root = tmp_path_factory.mktemp("malformed").resolve()
    program = Path(__file__).with_name("malformed.py")
    done = subprocess.run([sys.executable, str(program), str(root)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_file_that_lies_is_one_line_of_an_error_of_ours(tried):
    results = tried["results"]
    assert len(results) >= 500
    odd = [row for row in results if not row["kind"] or "\n" in row["said"] or not 0 < len(row["said"]) < 500]
    assert not odd, odd[:5]


def test_no_file_that_lies_takes_long_or_much_memory(tried):
    slow = [(row["name"], row["seconds"]) for row in tried["results"] if row["seconds"] > SLOWEST]
    assert not slow
    assert tried["megabytes"] < MOST_MEMORY


def test_no_file_that_lies_runs_anything_or_reads_elsewhere(tried):
    assert len(tried["control"]) == 2, "the watch must see a file opened and a program started"
    assert tried["events"] == []
    assert not tried["canary"]
