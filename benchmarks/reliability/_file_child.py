"""Run one of the package's own programs with an audit hook that records what it does.

    python -I _file_child.py RECORD FOLDER -I PROGRAM

The package starts its two programs that read files in a process of their own as `sys.executable -I PROGRAM`; the fuzzer
sets `sys.executable` to a script that runs this file. The programs install an audit hook that refuses actions, which is
the event sys.addaudithook. Before it, a program may not open a file in FOLDER; after it, none outside of FOLDER. It may
start a program or open a socket neither before nor after. What is refused is recorded too: this hook comes first.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

FORBIDDEN = (
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.startfile", "pty.spawn", "socket.",
)  # fmt: skip


def is_inside(path: str | bytes, folder: str) -> bool:
    """Return whether the real path of a file is in a folder, whose path must be a real path too."""
    return os.path.realpath(os.fsdecode(path)).startswith(folder + os.sep)


def run(record: str, folder: str, option: str, program: str) -> None:
    """Run a program under the hook, which appends what it sees to the file `record`."""
    descriptor = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    has_sandbox = False

    def write(text: str) -> None:
        os.write(descriptor, f"{os.path.basename(program)}: {text}\n".encode(errors="replace"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal has_sandbox
        if event == "sys.addaudithook":
            has_sandbox = True
        elif event == "open" and isinstance(args[0], str | bytes):
            if is_inside(args[0], folder) != has_sandbox:
                write(f"open {args[0]!r} {'in' if has_sandbox else 'before'} its sandbox")
        elif event == "subprocess.Popen" or event.startswith(FORBIDDEN):
            write(event)

    if option != "-I":
        write(f"it was started with {option}, without -I")
    sys.addaudithook(hook)
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


def run_forked(arguments: list[str], env: dict[str, str], may_start: int) -> None:
    """Run a program in a process that was forked and has no program of its own yet; never return.

    may_start: a pipe; the program starts as soon as a byte can be read from it.
    """
    try:
        os.closerange(3, may_start)
        os.closerange(may_start + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(may_start, 1)
        os.environ.clear()
        os.environ.update(env)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        run(*arguments)
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    run(*sys.argv[1:])
