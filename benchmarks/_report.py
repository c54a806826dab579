"""Shared by the benchmarks: the name of the machine, and files of results with one section per table."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if its code was changed since.

    The variable COMMIT gives it where the folder is a copy without history.
    """
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    folder = Path(__file__).parent
    name = _run_git("-C", str(folder), "rev-parse", "--short", "HEAD")
    is_changed = _run_git("-C", str(folder.parent), "status", "--porcelain", "--", "src", "benchmarks/*.py")
    return f"{name}-dirty" if name and is_changed else name or "unknown"


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def command_line() -> str:
    """Return the command that runs this program with its arguments; of a path, only its last part."""
    words = [word if word.startswith("-") else Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def source() -> str:
    """Return where a table comes from: command, date, commit, machine and version of torch."""
    return f"`{command_line()}`, {date.today()}, commit {commit()}: {device_name()}, torch {torch.__version__}"


def print_report(lines: list[str], out: Path | None) -> None:
    """Print a report and, if `out` is given, write it there."""
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text, encoding="utf-8")


def write_section(path: Path, heading: str, section: str) -> None:
    """Write a section into a file of results; it replaces the section with the same first line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# {heading}\n"
    head, *sections = text.split("\n## ")
    title = section.strip().split("\n")[0]
    sections = [old.strip() for old in sections if old.split("\n")[0] != title]
    path.write_text("\n\n## ".join([head.strip(), *sorted([*sections, section.strip()])]) + "\n", encoding="utf-8")
