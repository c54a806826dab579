"""A process that dies, hangs or runs out of memory: one line, a log of every process, and a run that can be resumed."""

import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousError
from training_support import last_logged_step, launch_training, read_log, read_metrics, write_recipe

import monoblock
from monoblock.errors import ConfigError, InputError, MonoblockError
from monoblock.parallel.faults import has_ended, is_restarted, translate_fault
from monoblock.parallel.launch import launch
from monoblock.parallel.world import defer_worker_errors
from monoblock.runs.run_folder import check_run_folder
from monoblock.training import checkpoint
from monoblock.training.interrupt import stop_on_interrupt

LONG = {"train": {"steps": 100_000, "save_every": 15, "eval_every": 0}}


# -- what is reported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError("[gloo/transport/tcp/buffer.cc:78] Timed out waiting 10000ms for recv"), "parallel.timeout"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:9"), "lost the connection"),
        (torch.distributed.DistNetworkError("The client socket has timed out after 9000ms"), "parallel.timeout"),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp, remote process exited"), "lost the connection"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "process 3 ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "process 3 ran out of memory"),
        (MemoryError(), "process 3 ran out of memory"),
    ],
)
def test_an_error_of_torch_becomes_one_line(problem, words):
    error = str(translate_fault(problem, 3))
    assert words in error
    assert "continue with --resume" in error
    assert "\n" not in error


@pytest.mark.parametrize("problem", [RuntimeError("shape mismatch"), KeyError("x"), InputError("out of memory")])
def test_other_errors_are_left_alone(problem):
    assert translate_fault(problem, 0) is None


def test_a_single_process_keeps_the_error_of_torch():
    with pytest.raises(RuntimeError, match="gloo"), defer_worker_errors({}):
        raise RuntimeError("gloo")


def receive_sigterm_and_fail(problem):
    with stop_on_interrupt(rank=1, processes=2):
        signal.raise_signal(signal.SIGTERM)
        raise problem


@pytest.mark.parametrize(
    ("problem", "ends"), [(RuntimeError("gloo: Connection closed by peer"), True), (InputError("no rows"), False)]
)
def test_a_process_that_torchrun_ends_does_not_report_the_lost_connection(problem, ends):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(type(problem)):
            receive_sigterm_and_fail(problem)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM] * ends


def test_a_restart_is_recognized():
    assert [is_restarted(e) for e in ({}, {"TORCHELASTIC_RESTART_COUNT": "0"})] == [False, False]
    assert is_restarted({"TORCHELASTIC_RESTART_COUNT": "2"})


def test_a_run_starts_in_a_folder_in_which_one_was_killed_before_it_stored_its_recipe(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("run.lock", "recipe.toml.tmp", "logs/rank-0.log"):
        (tmp_path / name).touch()
    check_run_folder(tmp_path, resume=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        check_run_folder(tmp_path, resume=False)


# -- faults of real processes ----------------------------------------------------------------------------------------


def start_and_wait(recipe, out, *words, step=20):
    process = launch_training(recipe, out, *words, "--nproc", "2")
    wait_for_step(process, out, step)
    return process


def wait_for_step(process, out, step):
    while last_logged_step(out) < step:
        assert process.poll() is None, read_log(out)
        time.sleep(0.01)


def rank_process(launcher, rank):
    return child_ranks(launcher)[rank]


def child_ranks(launcher):
    """Find the processes of a launcher and their ranks by their environment variables."""
    ranks = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        for word in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                ranks[int(word[5:])] = int(child)
    return ranks


def one_error(out):
    lines = read_log(out).splitlines()
    assert "Traceback" not in read_log(out)
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, lines
    return errors[0]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "strategy"), [(0, "fsdp"), (1, "ddp"), (1, "tp")])
def test_a_process_that_hangs_ends_the_run_after_the_time_out(rank, strategy, tmp_path):
    recipe, out = write_recipe(tmp_path, LONG, {"model": {"width": 24}}), tmp_path / "run"
    process = start_and_wait(recipe, out, f"train.parallel={strategy}", "parallel.timeout=6")
    pids = [rank_process(process.pid, number) for number in (0, 1)]
    os.kill(pids[rank], signal.SIGSTOP)
    start = time.monotonic()
    while "error: " not in read_log(out):
        assert time.monotonic() - start < 300
        time.sleep(0.1)
    assert process.wait(600) == 1, "torchrun waits for 30 seconds, then kills the process that hangs"
    assert f"process {1 - rank} waited longer than parallel.timeout" in one_error(out)
    assert not any(map(is_alive, pids))
    assert "Timed out" in (out / f"logs/rank-{1 - rank}.log").read_text()


@pytest.mark.slow
def test_a_process_without_memory_ends_the_run(tmp_path):
    """Blocks of more than 32 MB, such as the logits here, are always requested from the system."""
    sizes = {"train": {"batch": 128}, "model": {"width": 24, "heads": 3, "vocab": 4096, "context": 40}}
    recipe, out = write_recipe(tmp_path, LONG, sizes), tmp_path / "run"
    process = start_and_wait(recipe, out, step=3)
    resource.prlimit(rank_process(process.pid, 1), resource.RLIMIT_AS, (2**20, 2**20))
    assert process.wait(600) == 1
    assert "process 1 ran out of memory" in one_error(out)
    assert "allocate memory" in (out / "logs/rank-1.log").read_text()


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_run_resumes(tmp_path):
    recipe, out = write_recipe(tmp_path, LONG, {"train": {"steps": 40}}), tmp_path / "run"
    process = start_and_wait(recipe, out, "--max-restarts", "1")
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert process.wait(600) == 0, read_log(out)
    assert [line["step"] for line in read_metrics(out) if "loss" in line] == list(range(1, 41))
    log = (out / "logs/rank-1.log").read_text()
    assert "restart 1, rank 1 of 2" in log
    assert "step 40/40" in log


@pytest.mark.slow
def test_processes_whose_launcher_is_killed_save_and_stop(tmp_path):
    recipe, out = write_recipe(tmp_path, LONG), tmp_path / "run"
    process = start_and_wait(recipe, out)
    pids = [rank_process(process.pid, rank) for rank in (0, 1)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 300
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert checkpoint.find_newest(out / "checkpoints")[0].name == f"step-{last_logged_step(out)}"
    assert "Resume with" in read_log(out)
    assert "Traceback" not in read_log(out)


@pytest.mark.parametrize(
    ("node", "launcher", "end", "message"),
    [
        (platform.node(), 0, "--- end: process 0 lost the connection", None),
        (platform.node(), 0, "", "the connection to another machine was lost; continue with --resume"),
        (platform.node(), 1, "", "could not connect at --head node1:29500: closed"),
        ("another", 0, "--- end: completed", "could not connect at --head node1:29500: closed"),
    ],
)
def test_a_lost_machine_is_reported_once(node, launcher, end, message, tmp_path, monkeypatch):
    """All machines write their logs in the same folder."""

    def fail(arguments):
        (tmp_path / "logs").mkdir()
        start = f"--- 2026-01-01 00:00:00 {node}, process id 5, started by process {os.getpid() + launcher}"
        (tmp_path / "logs/rank-0.log").write_text(f"{start}, rank 0 of 2: monoblock train x\n{end}\n")
        raise RendezvousError("closed")

    monkeypatch.setattr(torchrun, "run", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if message is None:
        assert launch(["train"], 1, "cpu", tmp_path, machines=2, head="node1:29500") == 1
    else:
        with pytest.raises(MonoblockError, match=message):
            launch(["train"], 1, "cpu", tmp_path, machines=2, head="node1:29500")


def test_the_log_of_a_process_names_its_launcher(tmp_path):
    code = "import os, sys; from pathlib import Path; from monoblock.parallel.faults import log_output\n"
    code += "with log_output(Path(sys.argv[1]), ['x'], os.environ): pass"
    source = str(Path(monoblock.__file__).parent.parent)
    environment = os.environ | {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=600)
    assert has_ended(tmp_path, os.getpid(), 0)
    assert has_ended(tmp_path, os.getpid() + 1, 0) is None
    log = tmp_path / "logs/rank-0.log"
    assert has_ended(tmp_path, os.getpid(), log.stat().st_mtime + 0.01), "files have the time of the last tick"
    assert has_ended(tmp_path, os.getpid(), time.time() + 60) is None


# -- several machines ------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch_machines(recipe, out, *words):
    """Start the launchers of two machines, which are both this one."""
    head = f"127.0.0.1:{free_port()}"
    logs = [out.with_name(f"machine-{number}") for number in (0, 1)]
    options = ["--nnodes", "2", "--head", head, *words]
    return [launch_training(recipe, log, *options, "--out", str(out)) for log in logs], logs


@pytest.mark.slow
def test_two_machines_train_the_run_of_two_processes(tmp_path):
    recipe, out = write_recipe(tmp_path, LONG, {"train": {"steps": 20, "parallel": "fsdp"}}), tmp_path / "run"
    launchers, logs = launch_machines(recipe, out)
    assert [launcher.wait(600) for launcher in launchers] == [0, 0], [read_log(log) for log in logs]
    assert sorted("Saved" in read_log(log) for log in logs) == [False, True]
    process = launch_training(recipe, tmp_path / "one", "--nproc", "2")
    assert process.wait(600) == 0
    assert read_metrics(out) == read_metrics(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True], ids=["the launcher", "the launcher and its process"])
def test_a_killed_machine_ends_the_other_with_one_line(everything, tmp_path):
    recipe, out = write_recipe(tmp_path, LONG), tmp_path / "run"
    launchers, logs = launch_machines(recipe, out)
    for launcher in launchers:
        wait_for_step(launcher, out, 20)
    main = next(number for number, launcher in enumerate(launchers) if 0 in child_ranks(launcher.pid))
    (rank,) = child_ranks(launchers[1 - main].pid).values()
    if everything:
        os.kill(rank, signal.SIGSTOP)  # so that it does not save when its launcher is gone
    launchers[1 - main].kill()
    if everything:
        os.kill(rank, signal.SIGKILL)
    launchers[1 - main].wait(600)
    assert launchers[main].wait(600) in (1, 143), read_log(logs[main])
    text = read_log(logs[main])
    assert not any(words in text for words in ("Traceback", "frame #"))
    if everything:
        assert " connection to another " in one_error(logs[main])
    else:
        assert text.count("Resume with") == 1
        assert "error: " not in text
