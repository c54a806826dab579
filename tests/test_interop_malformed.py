"""Five hundred files that lie (malformed.py): each one line of one of our errors, nothing run, nothing else read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

SLOWEST = 2.0  # seconds of processor time, so that a busy machine changes nothing
WITH_TORCH = 6.0  # a pickle is read by a process of its own, which first imports torch: about 2 s by itself
MOST_MEMORY = 256  # MB beyond what reading good files takes


def test_a_file_that_lies_is_one_line_soon_and_with_nothing_run_or_read_elsewhere(tmp_path):
    program = Path(__file__).with_name("malformed.py")
    words = [sys.executable, str(program), str(tmp_path.resolve())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    tried = json.loads(done.stdout)
    results = tried["results"]
    assert len(results) >= 500
    odd = [row for row in results if not row["kind"] or "\n" in row["said"] or not 0 < len(row["said"]) < 500]
    assert not odd, odd[:5]
    late = [row for row in results if row["seconds"] > (WITH_TORCH if row["name"].startswith("pickle") else SLOWEST)]
    assert [(row["name"], row["seconds"]) for row in late] == []
    assert tried["megabytes"] < MOST_MEMORY
    assert len(tried["control"]) == 2, "the watch must see a file opened and a program started"
    assert tried["events"] == []
    assert not tried["canary"]
