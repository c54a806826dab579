"""Read valid and damaged files, and measure each: what files.py runs in its worker processes."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _file_groups
import _file_mutations
import _file_payloads
import _file_seeds
from _file_child import FORBIDDEN, is_inside, run_forked
from _file_processes import ProcessGroup
from _file_seeds import Seed

from monoblock.errors import MonoblockError
from monoblock.interop import convert
from monoblock.tokenizers import chat_template

VARIANTS = 6  # of every kind of valid files
MAX_SECONDS, MAX_CHILD_SECONDS = 2.0, 5.0
MAX_MEMORY = 256 * 2**20
MAX_TRIES = 3  # of a case over its time, which another program on the machine may have caused
MAX_MESSAGE_LENGTH = 300
START_EVERY = 10  # damaged pickle: the program that reads it is started; for the others it is forked from the worker
OWN_PROGRAMS = (str(chat_template.PROGRAM), str(convert.PROGRAM))


class Watch:
    """An audit hook that records what a reader does outside of its folder."""

    def __init__(self, python: str) -> None:
        self.python = python  # with which the package must start its own programs
        self.folder: str | None = None
        self.found: list[str] = []
        self.programs: list[str] = []  # of the package, that were started
        sys.addaudithook(self.record)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not watch what the fuzzer itself does."""
        folder, self.folder = self.folder, None
        yield
        self.folder = folder

    def record(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            if not is_inside(args[0], self.folder):
                self.found.append(f"open {os.fsdecode(args[0])}")
        elif event == "subprocess.Popen":
            executable, command = args[0], list(args[1])
            if executable == self.python and command in [[self.python, "-I", path] for path in OWN_PROGRAMS]:
                self.programs.append(os.path.basename(command[-1]))
            else:
                self.found.append(f"program {command}")
        elif event.startswith(FORBIDDEN):
            self.found.append(event)


class CaseReader:
    """Copies a folder of valid files, damages one of them, reads the folder and measures that."""

    def __init__(self, root: Path) -> None:
        self.case, self.folder, self.canary = root / "case", root / "case" / "folder", root / "canary"
        self.child_record = root / "child-record"
        self.child_record.touch()
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.case)
        self.watch = Watch(self._write_interpreter(root / "python"))
        self.processes = ProcessGroup(self.watch.pause)

    def _write_interpreter(self, path: Path) -> str:
        """Write a script that runs the package's programs with an audit hook, and make it `sys.executable`."""
        runner = Path(__file__).with_name("_file_child.py")
        command = [sys.executable, "-I", str(runner), str(self.child_record), str(self.folder)]
        path.write_text(f'#!/bin/sh\nexec {" ".join(map(repr, command))} "$@"\n')
        path.chmod(0o700)
        sys.executable = str(path)
        return str(path)

    def _fork_program(self, command: list[str], env: dict[str, str], may_start: int) -> None:
        run_forked([str(self.child_record), str(self.folder), *command[1:]], env, may_start)

    def read(self, seed: Seed, file: str | None = None, rng_seed: int = 0) -> dict[str, Any]:
        """Read a folder with one damaged file, up to MAX_TRIES times if it takes too long; return the fastest row."""
        rows = []
        is_forked = seed.kind == "pickle" and file is not None and rng_seed % START_EVERY != 0
        self.processes.fork_program = self._fork_program if is_forked else None
        for tries in range(1, MAX_TRIES + 1):
            rows.append(self._read_once(seed, file, rng_seed) | {"tries": tries})
            if rows[-1]["outcome"] != "too slow":
                return rows[-1]
        return min(rows, key=lambda row: row["alone"])

    def _read_once(self, seed: Seed, file: str | None, rng_seed: int) -> dict[str, Any]:
        change = self._prepare(seed, file, rng_seed)
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        group = "" if file is None else _file_groups.file_group(seed, file)
        row: dict[str, Any] = {"kind": seed.kind, "group": group, "file": file, "change": change}
        os.truncate(self.child_record, 0)
        os.ftruncate(2, 0)
        start = self.processes.start()
        row |= self._call(seed)
        end, grown, child = self.processes.stop()
        times = end - start
        row |= {"wall": round(times.clock, 3), "alone": round(times.alone, 3), "seconds": round(times.cpu, 3)}
        row |= {"mb": grown >> 20, "child_mb": child >> 20, "programs": self.watch.programs}
        row |= {"has_child": seed.has_child, "forked": self.processes.fork_program is not None}
        limit = MAX_CHILD_SECONDS if seed.has_child else MAX_SECONDS
        problems = {
            "outside": "; ".join(self._found_outside())[:MAX_MESSAGE_LENGTH],
            "prints": os.pread(2, MAX_MESSAGE_LENGTH, 0).decode(errors="replace"),
            "too slow": f"{times.alone:.2f} s" if max(times.alone, times.cpu) > limit else "",
            "too much memory": f"{(grown + child) >> 20} MB" if grown + child > size + MAX_MEMORY else "",
            "invalid": row.get("message", "") if seed.is_valid and file is None and row["outcome"] != "loaded" else "",
        }
        if row["outcome"] in ("loaded", "refused"):
            name, text = next(((name, text) for name, text in problems.items() if text), (row["outcome"], ""))
            row |= {"outcome": name} | ({"message": text} if text else {})
        return row

    def _prepare(self, seed: Seed, file: str | None, rng_seed: int) -> str:
        """Copy the files of a case, and damage one; return what was done to it."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(seed.folder, self.folder, symlinks=True)
        if file is None:
            return ""
        rng = random.Random(rng_seed)
        target = self.folder / file
        outside = self.case / f"outside-{target.name}" if seed.refuses_link(file) else None
        change = _file_mutations.damage(target, rng, outside)
        if seed.kind == "checkpoint" and rng.random() < 0.7 and target.is_file():
            _file_mutations.repair_manifest(target)
        return change

    def _call(self, seed: Seed) -> dict[str, Any]:
        """Read the folder as a user does, under the audit hook; return the outcome."""
        self.watch.found, self.watch.programs, self.watch.folder = [], [], str(self.folder)
        try:
            _file_seeds.READERS[seed.read](self.folder)
        except MonoblockError as problem:
            text, cause = str(problem), problem.__cause__
            is_short = "\n" not in text and len(text) <= MAX_MESSAGE_LENGTH
            row = {"outcome": "refused" if is_short else "several lines", "message": text[:MAX_MESSAGE_LENGTH]}
            # An error that only the guard at the reader's door turned into one of the package.
            return row | ({} if cause is None else {"guarded": f"{type(cause).__name__}: {str(cause)[:100]}"})
        except BaseException as problem:  # also a Rust panic
            return {"outcome": "untyped error", "message": f"{type(problem).__name__}: {str(problem)[:200]}"}
        finally:
            self.watch.folder = None
        return {"outcome": "loaded"}

    def _found_outside(self) -> list[str]:
        found = self.watch.found + self.child_record.read_text(errors="replace").splitlines()
        if self.canary.exists():
            self.canary.unlink()
            found.insert(0, "a payload ran")
        return found


def work(seed: int, smoke: bool) -> None:
    """Read case numbers from standard input, and write one JSON object about each to standard output.

    The numbers -1, -2, … are the valid files and then the payloads; a number from 0 on is a damaged file.
    """
    warnings.simplefilter("ignore")
    faulthandler.enable()
    results = os.fdopen(os.dup(1), "w", buffering=1)
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="monoblock-files-")))
    variants = range(1 if smoke else VARIANTS)
    seeds = [row for variant in variants for row in _file_seeds.write_seeds(root / "seeds", variant)]
    seeds = [row for row in seeds if not smoke or row.kind != "pickle"]
    first = seeds[: len(seeds) // len(variants)]
    payloads = list(_file_payloads.write_payloads(root / "payloads", first, root / "canary"))
    reader = CaseReader(root)
    for row in first:  # imports everything
        reader.read(row)
    import safetensors.torch  # noqa: F401  for forked programs

    targets = _file_groups.group_targets(seeds)
    results.write(json.dumps({"valid": len(seeds), "payloads": len(payloads)}) + "\n")
    for line in sys.stdin:
        number = int(line)
        if number < 0:
            result = reader.read((seeds + payloads)[-number - 1])
        else:
            rng_seed = seed * 1_000_003 + number
            result = reader.read(*_file_groups.choose_target(targets, random.Random(rng_seed)), rng_seed)
        results.write(json.dumps(result | {"number": number}) + "\n")
    shutil.rmtree(root, ignore_errors=True)
