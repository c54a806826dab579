"""Read damaged files of every kind, and count what goes wrong.

A worker process reads valid files, which must load, and then damaged ones. A damaged file may load, or raise one of
the package's exceptions with a message of one line. It must not raise another exception, end the process, take more
than 2 s of processor time (5 s with a process of its own) or more memory than 256 MB and its size, open a file outside
of its folder, start a program or open a socket.

    python benchmarks/reliability/files.py --cases 20000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

VARIANTS = 6  # of every kind of valid files
SMOKE_CASES = 250
PICKLE_SHARE = 0.02  # of the cases; each starts a process that imports torch
MAX_SECONDS, MAX_CHILD_SECONDS = 2.0, 5.0
MAX_MEMORY = 256 * 2**20
HANG_SECONDS, HANG_CPU_SECONDS = 900.0, 60.0  # without a result, on a machine that may be busy
RESULTS = Path(__file__).parents[1] / "results" / "files.md"
FORBIDDEN = ("os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.startfile", "socket.", "pty.spawn")
# The programs of the package that read files in a process of their own, with limits and an audit hook that refuses.
SANDBOXES = ("template_program.py", "unpickle.py")
PROBLEMS = ("untyped error", "several lines", "crash", "too slow", "too much memory", "outside", "invalid")


# -- the worker --------------------------------------------------------------------------------------------------------


class Watch:
    """An audit hook that records what a reader does outside of its folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.found: list[str] = []
        sys.addaudithook(self.record)

    def record(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(self.folder):
                self.found.append(f"open {path}")
        elif event == "subprocess.Popen":
            if not str(args[1][-1]).endswith(SANDBOXES):
                self.found.append(f"program {args[1]}")
        elif event.startswith(FORBIDDEN):
            self.found.append(event)


def work(seed: int, smoke: bool) -> None:
    """Read case numbers from standard input, and write one JSON object about each to standard output."""
    import _file_mutations as file_mutations
    import _file_payloads
    import _file_seeds as file_seeds

    from monoblock.errors import MonoblockError

    warnings.simplefilter("ignore")
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints its panics there
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="monoblock-files-")))
    os.environ["TMPDIR"] = tempfile.tempdir = str(root / "case")
    variants = range(1 if smoke else VARIANTS)
    seeds = [row for variant in variants for row in file_seeds.write_seeds(root / "seeds", variant)]
    seeds = [row for row in seeds if not smoke or row.kind != "pickle"]
    case, canary = root / "case", root / "canary"
    payloads = list(_file_payloads.write_payloads(root / "payloads", seeds[: len(seeds) // len(variants)], canary))
    watch = Watch()

    def read(seed_row: Any, damage: random.Random | None) -> dict[str, Any]:
        shutil.rmtree(case, ignore_errors=True)
        folder = case / "folder"
        shutil.copytree(seed_row.folder, folder, symlinks=True)
        done = ""
        if damage is not None and not seed_row.kind.startswith("payload"):
            target = folder / damage.choice(seed_row.files)
            done = file_mutations.damage(target, damage, links=seed_row.read not in file_seeds.NAMED_BY_USER)
            if seed_row.kind == "checkpoint" and damage.random() < 0.7 and target.is_file():
                file_mutations.repair_manifest(target)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        row: dict[str, Any] = {"kind": seed_row.kind, "change": done, "outcome": "loaded"}
        _reset_peak()
        start, before = _cpu_seconds(), _resident_bytes()
        watch.found, watch.folder = [], str(folder)
        try:
            file_seeds.READERS[seed_row.read](folder)
        except MonoblockError as problem:
            text = str(problem)
            row["outcome"] = "several lines" if "\n" in text or len(text) > 300 else "refused"
            row["message"] = text[:300]
            cause = (
                problem.__cause__
            )  # an error that only the guard at the reader's door turned into one of the package
            row["guarded"] = f"{type(cause).__name__}: {str(cause)[:100]}" if cause is not None else None
        except BaseException as problem:
            row |= {"outcome": "untyped error", "message": f"{type(problem).__name__}: {str(problem)[:200]}"}
        finally:
            watch.folder = None
        seconds = _cpu_seconds() - start
        row["seconds"] = round(seconds, 3)
        grown = _peak_bytes() - before
        row["mb"] = grown >> 20
        if canary.exists():
            row |= {"outcome": "outside", "message": "a payload ran"}
            canary.unlink()
        elif watch.found:
            row |= {"outcome": "outside", "message": "; ".join(watch.found)[:300]}
        elif seconds > (MAX_CHILD_SECONDS if seed_row.has_child else MAX_SECONDS):
            row["outcome"] = "too slow"
        elif grown > size + MAX_MEMORY:
            row["outcome"] = "too much memory"
        elif damage is None and row["outcome"] != "loaded":
            row["outcome"] = "invalid"
        return row

    for row in seeds[: len(seeds) // len(variants)]:  # imports everything
        read(row, None)
    results.write(json.dumps({"valid": len(seeds), "payloads": len(payloads)}) + "\n")
    for line in sys.stdin:
        number = int(line)
        rng = random.Random(seed * 1_000_003 + number)
        if number < -len(seeds):
            row = read(payloads[-number - 1 - len(seeds)], rng)
        elif number < 0:
            row = read(seeds[-number - 1], None)
        else:
            others = [row for row in seeds if row.kind != "pickle"]
            pickles = [row for row in seeds if row.kind == "pickle"]
            row = read(rng.choice(pickles if pickles and rng.random() < PICKLE_SHARE else others), rng)
        results.write(json.dumps(row | {"number": number}) + "\n")
    shutil.rmtree(root, ignore_errors=True)


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    """Return the largest resident size since `_reset_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


# -- the supervisor ----------------------------------------------------------------------------------------------------


class Worker:
    """A worker process, started again after a crash or a hang."""

    def __init__(self, seed: int, smoke: bool) -> None:
        command = [sys.executable, __file__, "--worker", "--seed", str(seed), *["--smoke"] * smoke]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        started = self._receive(starting=True)
        self.valid, self.payloads = started["valid"], started["payloads"]

    def run(self, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        return self._receive()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _receive(self, starting: bool = False) -> dict[str, Any]:
        assert self.process.stdout is not None
        end, end_cpu = time.monotonic() + HANG_SECONDS, self._cpu_seconds() + HANG_CPU_SECONDS
        while starting or (time.monotonic() < end and self._cpu_seconds() < end_cpu):
            if select.select([self.process.stdout], [], [], 1)[0]:
                line = self.process.stdout.readline()
                if line:
                    return json.loads(line)
                return {"outcome": "crash", "message": f"exit code {self.process.wait()}", "kind": "?"}
        return {"outcome": "too slow", "message": "no result", "kind": "?"}

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_cases(numbers: list[int], seed: int, smoke: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """Read all valid files and then the cases; return the number of valid files and a row about each."""
    worker, rows = Worker(seed, smoke), []
    valid = worker.valid
    numbers = [*range(-valid - worker.payloads, 0), *numbers]
    for count, number in enumerate(numbers, 1):
        row = worker.run(number)
        rows.append({"number": number} | row)
        if row["outcome"] in PROBLEMS:
            sys.stderr.write(f"\n{json.dumps(row)}\n")
        if row["kind"] == "?":
            worker.close()
            worker = Worker(seed, smoke)
        if count % 50 == 0 or count == len(numbers):
            problems = sum(row["outcome"] in PROBLEMS for row in rows)
            sys.stderr.write(f"\r{count}/{len(numbers)} files, {problems} problems")
    worker.close()
    sys.stderr.write("\n")
    return valid, rows


def format_table(valid: int, cases: list[dict[str, Any]], command: str, seconds: float) -> str:
    kinds: dict[str, Counter[str]] = {}
    for row in cases:
        kinds.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    lines = [f"Written by `{command}` in {seconds:.0f} s.", ""]
    lines += [f"{valid} valid files were read first; all of them must load.", ""]
    lines += [
        "| files | cases | refused | still valid | " + " | ".join(PROBLEMS) + " |",
        "|---" * (4 + len(PROBLEMS)) + "|",
    ]
    for kind, counts in [*sorted(kinds.items()), ("all", sum(kinds.values(), Counter[str]()))]:
        cells = [kind, sum(counts.values()), counts["refused"], counts["loaded"], *(counts[name] for name in PROBLEMS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    slowest, largest = max(row.get("seconds", 0) for row in cases), max(row.get("mb", 0) for row in cases)
    lines += ["", f"Slowest case: {slowest:.2f} s of processor time. Largest growth of memory: {largest} MB."]
    guarded = sum(bool(row.get("guarded")) for row in cases)
    lines += [f"Errors that only the guard at a reader's door turned into a FileError: {guarded}."]
    return "# Damaged files\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name} in benchmarks/results")
    parser.add_argument("--log", type=Path, help="write a line about each case to this file")
    parser.add_argument("--smoke", action="store_true", help=f"read {SMOKE_CASES} damaged files, and no pickles")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.seed, args.smoke)
        return 0
    start = time.perf_counter()
    count = SMOKE_CASES if args.smoke else args.cases
    valid, rows = run_cases(list(range(args.first, args.first + count)), args.seed, args.smoke)
    cases = [row for row in rows if not -valid <= row["number"] < 0]
    if args.log is not None:
        args.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"python benchmarks/reliability/files.py --cases {count} --seed {args.seed}"
    table = format_table(valid, cases, command, time.perf_counter() - start)
    if args.write:
        RESULTS.write_text(table, encoding="utf-8")
    print(table)
    problems = [row for row in rows if row["outcome"] in PROBLEMS]
    for row in problems[:20]:
        print(json.dumps(row))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
