"""One process trains in a run folder: a second is refused, and the lock of a process that is gone is not in the way."""

import json
import os
import signal
import threading
import time

import pytest
from processes import Process, execute
from training_support import (
    last_logged_step,
    launch_training,
    list_files,
    read_log,
    read_metrics,
    run_command,
    write_recipe,
)

import monoblock as mb
from monoblock.errors import FileError
from monoblock.runs import run_folder
from monoblock.runs.run_folder import LOCK_FILE, lock_run_folder
from monoblock.training.events import StepEvent
from monoblock.training.interrupt import stop_on_interrupt

GONE = 2**22 + 1  # larger than every process id of Linux


@pytest.fixture(params=["flock", "no flock"])
def system(request, monkeypatch):
    if request.param == "no flock":
        monkeypatch.setattr(run_folder, "fcntl", None)


def test_a_second_lock_is_refused_with_the_process_id_of_the_first(system, tmp_path):
    folder = tmp_path / "run"
    with lock_run_folder(folder):
        before = list_files(folder)
        message = f"^process {os.getpid()} is training in {folder}; [^\n]*--out"
        with pytest.raises(FileError, match=message), lock_run_folder(folder):
            pass
        assert list_files(folder) == before
    with lock_run_folder(folder):
        pass


def test_a_new_folder_that_stays_empty_is_deleted_and_a_lock_is_released_after_an_error(system, tmp_path):
    for error in (KeyboardInterrupt, SystemExit, ValueError):
        with pytest.raises(error), lock_run_folder(tmp_path / "runs" / "run"):
            raise error
        assert not (tmp_path / "runs").exists()
    (tmp_path / "run").mkdir()
    with lock_run_folder(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_run_to_resume_is_not_created_and_other_ranks_do_not_lock(tmp_path):
    with lock_run_folder(tmp_path / "run", create=False), lock_run_folder(tmp_path / "other", is_main=False):
        assert not list(tmp_path.iterdir())
    with lock_run_folder(tmp_path / "run"), lock_run_folder(tmp_path / "run", is_main=False):
        pass


@pytest.mark.parametrize(
    "change",
    [
        {"pid": GONE},
        {"boot": "another"},
        {"host": "another"},
        {"started": "0"},
        {"pid": -1},
        {"pid": "1"},
        {"pid": 10**30},
    ],
    ids=str,
)
def test_a_stale_lock_is_recognized(system, tmp_path, change):
    """Of a process that is gone, of another process with its number, of another host, or of before the last boot."""
    (tmp_path / LOCK_FILE).write_text(json.dumps(run_folder._this_process() | change))
    with lock_run_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 4096, b"[]", b"{}", b"x" * 10**6])
def test_a_damaged_lock_file_is_stale(system, tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    with lock_run_folder(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_lock_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(FileError, match=r"run\.lock cannot be written: [^\n]*$"), lock_run_folder(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"file/run cannot be created: [^\n]*$"), lock_run_folder(tmp_path / "file/run"):
        pass


def test_a_killed_process_holds_no_lock_even_if_its_workers_live_on(tmp_path):
    script = """
import os, sys, time
from pathlib import Path
from monoblock.runs.run_folder import lock_run_folder
with lock_run_folder(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(60)
"""
    log = tmp_path / "log"
    process = Process(execute, script, [str(tmp_path / "run")], log=log)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    worker = int(log.read_text())
    try:
        with pytest.raises(FileError, match=f"process {process.pid} is training"), lock_run_folder(tmp_path / "run"):
            pass
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        with lock_run_folder(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_live_run_is_not_resumed_and_not_harmed(tmp_path, capsys):
    recipe, out = (
        write_recipe(tmp_path, {"train": {"steps": 1_000_000, "save_every": 0, "eval_every": 0}}),
        tmp_path / "run",
    )
    process = launch_training(recipe, out)
    try:
        while last_logged_step(out) < 3:
            assert process.poll() is None, read_log(out)
            time.sleep(0.01)
        for words in (["--resume"], []):
            assert run_command("train", recipe, "--out", out, *words) == 1
            assert f"error: process {process.pid} is training in {out}; " in capsys.readouterr().err
        step = last_logged_step(out)
        while last_logged_step(out) <= step:
            assert process.poll() is None, read_log(out)
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    steps = [line["step"] for line in read_metrics(out)]
    assert steps == list(range(1, len(steps) + 1))
    with lock_run_folder(out):
        pass


def test_two_runs_in_python_cannot_share_a_folder_and_the_first_is_not_harmed(tmp_path):
    recipe, problems = write_recipe(tmp_path), []

    def start_another(event):
        if isinstance(event, StepEvent) and event.step == 3:
            for resume in (False, True):
                with pytest.raises(FileError, match=f"process {os.getpid()} is training in") as problem:
                    mb.train(recipe, out=tmp_path / "run", resume=resume, progress=False)
                problems.append(problem)

    options = {"train.steps": 6}
    run = mb.train(recipe, options, out=tmp_path / "run", callbacks=[start_another], progress=False)
    assert (len(problems), run.trainer.step) == (2, 6)
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    alone = mb.train(recipe, options, out=tmp_path / "alone", progress=False)
    assert run.metrics == alone.metrics


# -- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_a_second_sigterm_stops_at_once():
    with stop_on_interrupt() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        assert stop.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match=r"^143$"):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_of_several_processes_the_first_signal_counts():
    with stop_on_interrupt(1, 2) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGTERM


def test_an_ignored_signal_stays_ignored_and_other_threads_receive_none():
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not stop()
    finally:
        signal.signal(signal.SIGTERM, previous)

    def in_thread():
        with stop_on_interrupt() as stop:
            results.append(stop())

    results = []
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert results == [False]


def test_sigterm_in_python_saves_and_then_calls_the_handler_of_the_program(tmp_path):
    recipe, received = write_recipe(tmp_path), []

    def terminate(event):
        if isinstance(event, StepEvent) and event.step == 2:
            signal.raise_signal(signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        run = mb.train(recipe, {"train.steps": 6}, out=tmp_path / "run", callbacks=[terminate], progress=False)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert (run.interrupted, received) == (True, [signal.SIGTERM])
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{run.trainer.step}"
    assert not (tmp_path / "run" / LOCK_FILE).exists()
