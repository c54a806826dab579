"""The small form of benchmarks/reliability/files.py: damaged files of every kind, read in a worker process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "reliability" / "files.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the memory of a case is measured on Linux")
def test_damaged_files_are_refused_in_one_line():
    pytest.importorskip("PIL")
    pytest.importorskip("gguf")
    import monoblock

    env = os.environ | {"PYTHONPATH": str(Path(monoblock.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, PROGRAM, "--smoke"], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_the_watch_sees_what_a_reader_does_outside_of_its_folder(tmp_path):
    code = f"""
import sys, subprocess, socket
sys.path.insert(0, {str(PROGRAM.parent)!r})
import files
watch = files.Watch()
watch.folder = {str(tmp_path)!r}
open({str(tmp_path / "inside")!r}, "w").close()
assert not watch.found
open({__file__!r}).close()
subprocess.run(["true"])
socket.socket().close()
watch.folder = None
print([word.split()[0] for word in watch.found])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("open", "program", "socket.__new__"):
        assert f"'{word}'" in result.stdout
