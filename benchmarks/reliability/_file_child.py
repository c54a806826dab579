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


def main() -> None:
    record, folder, option, program = sys.argv[1:]
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


if __name__ == "__main__":
    main()
