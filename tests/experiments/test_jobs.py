"""Jobs of an experiment run after their dependencies, in one process or several; one that fails stops no other."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest

from monoblock.errors import ConfigError, InputError
from monoblock.experiments.jobs import Job, run_jobs


@pytest.fixture
def quick_start(monkeypatch):
    processes.spawn_quickly(monkeypatch)


def write_file(folder, name, *dependencies):
    assert all((folder / dependency).is_file() for dependency in dependencies)
    (folder / name).write_text(name)
    yield "started"
    yield f"{name}: done"


def fail(folder):
    yield "started"
    raise InputError("a line too long; shorten it")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_runs_after_its_dependencies(tmp_path, processes):
    jobs = [
        Job("last", write_file, (tmp_path, "last", "one", "two"), ("one", "two")),
        Job("two", write_file, (tmp_path, "two", "one"), ("one",)),
        Job("one", write_file, (tmp_path, "one")),
    ]
    assert list(run_jobs(jobs, processes)) == [
        line for name in ("one", "two", "last") for line in ("started", f"{name}: done")
    ]
    with pytest.raises((ConfigError, InputError), match="a line too long; shorten it"):
        list(run_jobs([Job("bad", fail, (tmp_path,))], processes))


def end_process():
    yield "started"
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_one_line(quick_start):
    with pytest.raises(ConfigError, match=r"a process ended without a result.*the same command goes on"):
        list(run_jobs([Job("killed", end_process, ())], 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_job_stops_only_those_that_depend_on_it(quick_start, tmp_path, processes):
    jobs = [
        Job("bad", fail, (tmp_path,)),
        Job("after", write_file, (tmp_path, "after"), ("bad",)),
        Job("last", write_file, (tmp_path, "last"), ("one", "after")),
        Job("one", write_file, (tmp_path, "one")),
    ]
    with pytest.raises(ConfigError, match=r"bad: a line too long; shorten it \(2 more failed"):
        list(run_jobs(jobs, processes))
    assert {path.name for path in tmp_path.iterdir()} == {"one"}


def wait_for_file(path):
    yield "waiting"
    while not path.is_file():
        time.sleep(0.01)


def test_messages_of_other_processes_arrive_while_their_jobs_run(quick_start, tmp_path):
    go_on = tmp_path / "go on"
    messages = run_jobs([Job("one", wait_for_file, (go_on,))], 2)
    assert next(messages) == "waiting"
    go_on.touch()
    assert list(messages) == []


def write_late(folder, name):
    yield "started"
    time.sleep(15)
    (folder / name).write_text(name)


def test_jobs_that_run_are_not_waited_for_after_an_interrupt(quick_start, tmp_path):
    messages = run_jobs([Job(name, write_late, (tmp_path, name)) for name in ("one", "two")], 2)
    assert next(messages) == "started"
    with pytest.raises(KeyboardInterrupt):
        messages.throw(KeyboardInterrupt)
    assert not list(tmp_path.iterdir()), "a job went on to its end"
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:  # a thread of the pool collects them
        time.sleep(0.05)
    assert not multiprocessing.active_children()


def beat(path):
    """Show for half a minute that the process lives."""
    yield "started"
    for _ in range(300):
        with path.open("a") as file:
            file.write(".")
        time.sleep(0.1)


RUN_TWO = """
import sys
from pathlib import Path
from test_jobs import Job, beat, run_jobs
if __name__ == "__main__":
    for message in run_jobs([Job(name, beat, (Path(sys.argv[1]) / name,)) for name in ("one", "two")], 2):
        print(message, flush=True)
"""


def test_jobs_end_soon_after_their_main_process_is_killed(tmp_path):
    script, beats = tmp_path / "run_two.py", [tmp_path / "one", tmp_path / "two"]
    script.write_text(RUN_TWO)
    for path in beats:
        path.touch()
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, script, tmp_path], env=environment, stdout=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in beats] == [b"started\n"] * 2
        process.kill()
    deadline, sizes = time.monotonic() + 15, None
    while sizes != (sizes := [path.stat().st_size for path in beats]) and time.monotonic() < deadline:
        time.sleep(1)
    assert time.monotonic() < deadline, "a job went on without its main process"


def interrupt_twice(folder):
    """Interrupt two running jobs, and again while they are ended."""
    messages = run_jobs([Job(name, write_late, (folder, name)) for name in ("one", "two")], 2)
    next(messages)
    terminate = multiprocessing.process.BaseProcess.terminate

    def interrupt_and_terminate(process):
        os.kill(os.getpid(), signal.SIGINT)
        terminate(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "terminate", interrupt_and_terminate)
        with pytest.raises(KeyboardInterrupt):
            messages.throw(KeyboardInterrupt)
    if not multiprocessing.active_children():
        (folder / "ended").touch()


def test_another_interrupt_while_jobs_are_ended_is_ignored(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=interrupt_twice, args=(tmp_path,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]
