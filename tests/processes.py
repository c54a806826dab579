"""Processes of the tests that start in milliseconds: each is a fork of one that has imported torch and the package.

A fresh interpreter computes for several seconds until it has.  Tests of the start itself use one all the same.
"""

import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What a training run imports at the latest in its first step, and some libraries that it uses if they are there.
PRELOADED = ["monoblock.runs.train", "torch._dynamo", "tokenizers", "sacrebleu", "sacremoses"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Process:
    """A process that calls function(*arguments), with the interface of subprocess.Popen.

    function: one of a module, because it is pickled by its name; it returns the exit code, or None for 0.
    log: the file for whatever the process prints; `errors`, for what it prints as errors, if that is another file.
    environment: variables in addition to those of this process.
    cwd: the folder in which it runs.
    """

    def __init__(self, function, *arguments, log, errors=None, environment=None, cwd="."):
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        files = (str(log), str(errors or log))
        self._process = _context.Process(target=_run, args=(function, arguments, files, variables, str(cwd)))
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the first process imports torch
        try:
            self._process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS") if threads is None else os.environ.update(OMP_NUM_THREADS=threads)
        self.pid, self.sentinel = self._process.pid, self._process.sentinel

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run(function, arguments, files, variables, cwd):
    """Make a fork look like a process that a shell has started in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in processes in the background
    for stream, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.exit(function(*arguments))


def run(function, *arguments, timeout=600, **options):
    """Call function(*arguments) in a process, as subprocess.run does; return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = Process(function, *arguments, log=files[0], errors=files[1], **options)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(function, code, *(file.read_text() for file in files))


def run_script(path, *words, **options):
    """Run a Python file with the words of a command line, as `python PATH WORD …` does."""
    return run(_run_path, str(path), [str(word) for word in words], **options)


def _run_path(path, words):
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_code(code, *words, **options):
    """Run code, as `python -c CODE WORD …` does."""
    return run(execute, code, [str(word) for word in words], **options)


def execute(code, words):
    sys.argv = ["-c", *words]
    sys.path.insert(0, "")
    exec(code, {"__name__": "__main__"})


def spawn_quickly(monkeypatch):
    """Let multiprocessing start its processes in this way too, where it would start a fresh interpreter for each."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: _context)


def run_ranks(function, folder, processes):
    """Call function(folder) in several processes, with the variables that torchrun sets for each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [folder / f"rank-{rank}.log" for rank in range(processes)]
    ranks = [
        Process(function, folder, log=log, environment=sizes | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    try:
        running, deadline = list(ranks), time.monotonic() + 900
        while running and not any(process.poll() for process in ranks):
            assert time.monotonic() < deadline
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=60)
            running = [process for process in running if process.poll() is None]
        assert not any(process.poll() for process in ranks), "\n".join(log.read_text() for log in logs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
