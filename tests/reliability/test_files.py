"""The small form of benchmarks/reliability/files.py: damaged files of every kind, read in a worker process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import monoblock
from monoblock.interop import convert

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "reliability" / "files.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(monoblock.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux")


@pytest.mark.slow  # tests/interop/test_malformed.py reads 500 files of the same kinds
@on_linux
def test_damaged_files_are_refused_in_one_line():
    pytest.importorskip("PIL")
    pytest.importorskip("gguf")
    result = subprocess.run([sys.executable, PROGRAM, "--smoke"], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_the_watch_sees_what_a_reader_does_outside_of_its_folder(tmp_path):
    code = f"""
import sys, subprocess, socket
sys.path.insert(0, {str(PROGRAM.parent)!r})
from _file_worker import OWN_PROGRAMS, Watch
watch = Watch(sys.executable)
watch.folder = {str(tmp_path)!r}
open({str(tmp_path / "inside")!r}, "w").close()
assert not watch.found
open({__file__!r}).close()
subprocess.run(["true"])
subprocess.run([sys.executable, "-I", OWN_PROGRAMS[0]], input=b"")
assert watch.programs == ["template_program.py"]
subprocess.run([sys.executable, OWN_PROGRAMS[0]], input=b"")  # another command
socket.socket().close()
watch.folder = None
print(*[word.split()[0] for word in watch.found])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [word for word in result.stdout.split() if word in ("open", "program")] == ["open", "program", "program"]
    assert "socket.__new__" in result.stdout


CHILD = """
import os, sys
for path in sys.stdin.read().split():
    try:
        open(path).close()
        if path.endswith("inside"):
            sys.addaudithook(lambda event, args: None)
    except OSError:
        pass
os.system("true")
"""


def test_the_watch_in_a_program_sees_what_it_does_before_and_in_its_sandbox(tmp_path):
    program, record, folder = tmp_path / "program.py", tmp_path / "record", tmp_path / "folder"
    program.write_text(CHILD)
    record.touch()
    folder.mkdir()
    (folder / "inside").touch()
    command = [sys.executable, "-I", PROGRAM.with_name("_file_child.py"), record, folder, "-I", program]
    paths = f"{__file__} {folder / 'inside'} {folder / 'inside'} {__file__}"
    subprocess.run(command, input=paths, text=True, check=True)
    assert record.read_text().splitlines() == [
        f"program.py: open {str(folder / 'inside')!r} before its sandbox",
        f"program.py: open {__file__!r} in its sandbox",
        "program.py: os.system",
    ]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_opened_in_the_sandbox_and_nothing_else_there(zipped, tmp_path):
    record, folder = tmp_path / "record", tmp_path / "folder"
    record.touch()
    folder.mkdir()
    torch.save({"w": torch.zeros(2)}, folder / "model.pt", _use_new_zipfile_serialization=zipped)
    command = [sys.executable, "-I", PROGRAM.with_name("_file_child.py"), record, folder, "-I", convert.PROGRAM]
    job = {"source": str(folder / "model.pt"), "target": str(folder / "out.safetensors")}
    result = subprocess.run(command, input=json.dumps(job), text=True, check=True, capture_output=True)
    assert json.loads(result.stdout) == {"tensors": 1}
    assert not record.read_text()


@on_linux
def test_a_pickle_takes_little_more_memory_than_its_size(tmp_path):
    weights = {f"w{n}": torch.full((2**20, 4), float(n)) for n in range(8)} | {"turned": torch.arange(6.0).view(2, 3).T}
    weights["tied"] = weights["turned"]
    torch.save(weights, tmp_path / "model.pt")
    code = f"""
import sys, contextlib
sys.path.insert(0, {str(PROGRAM.parent)!r})
from _file_processes import ProcessGroup
from monoblock.interop.convert import pickle_to_safetensors
group = ProcessGroup(contextlib.nullcontext)
group.start()
pickle_to_safetensors("model.pt", "model.safetensors")
print(group.stop()[2])
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=ENVIRONMENT)
    assert int(result.stdout) < (tmp_path / "model.pt").stat().st_size + 256 * 2**20
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


@on_linux
def test_the_memory_and_the_time_of_a_process_are_measured():
    code = f"""
import sys, contextlib, subprocess
sys.path.insert(0, {str(PROGRAM.parent)!r})
from _file_processes import ProcessGroup
group = ProcessGroup(contextlib.nullcontext)
start = group.start()
subprocess.run([sys.executable, "-c", "a = bytearray(b'x' * 50_000_000); sum(range(20_000_000))"])
end, own, child = group.stop()
assert 50_000_000 < child < 200_000_000, child
assert own < 20_000_000, own
assert (end - start).cpu > 0.05
start = group.start()
a = bytearray(b"x" * 50_000_000)
end, own, child = group.stop()
assert own > 40_000_000, own
assert child == 0
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
