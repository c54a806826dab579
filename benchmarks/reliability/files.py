"""Read damaged files of every kind, and count what goes wrong.

Worker processes read valid files, which must load, and then damaged ones. A damaged file may load, or raise one of the
package's exceptions with a message of one line. These are problems:

untyped error    another exception
several lines    a message of more than one line or 300 characters
crash            the worker ended, or gave no result
prints           something was written to standard error, such as the message of a Rust panic
too slow         more than 2 s, or 5 s with a process of its own, in each of 3 tries: of processor time, or on the clock
                 without the time in which it was ready to run and other programs of the machine had the processor
too much memory  the growth of the worker and the size of the processes that it started are together larger than the
                 files of the case and 256 MB
outside          a file opened outside of the folder, a program started or a socket opened
invalid          a valid file that did not load

An audit hook in the worker sees every file, program and socket that Python opens while it reads a case; nothing is left
out. The package's own two programs, which read pickles and render chat templates in a process of their own, may be
started with exactly the command `sys.executable -I PROGRAM`, and are counted in the table. An audit hook runs in them
too (see _file_child.py). For nine in ten damaged pickles, the program is not started but runs in a fork of the worker,
which has imported torch already, and only its growth of memory counts. The hooks do not see what libraries in C++ or
Rust open, which get their paths from the package.

    python benchmarks/reliability/files.py --cases 20000
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _file_groups import GROUPS

SMOKE_CASES = 250
HANG_SECONDS, HANG_CPU_SECONDS = 900.0, 60.0  # without a result, on a machine that may be busy
RESULTS = Path(__file__).parents[1] / "results" / "files.md"
PROBLEMS = (
    "untyped error", "several lines", "crash", "prints", "too slow", "too much memory", "outside", "invalid",
)  # fmt: skip


class Worker:
    """A worker process, started again after a crash or a hang."""

    def __init__(self, seed: int, smoke: bool) -> None:
        command = [sys.executable, __file__, "--worker", "--seed", str(seed), *["--smoke"] * smoke]
        self.errors = tempfile.TemporaryFile("ab+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, bufsize=1
        )
        started = self._receive(starting=True)
        if "valid" not in started:
            raise SystemExit(f"the worker does not start: {started['message']}")
        self.valid, self.payloads = started["valid"], started["payloads"]

    def run(self, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        return self._receive()

    def close(self) -> None:
        """End the worker, which then deletes its files; one that gives no result is killed."""
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.errors.close()

    def _receive(self, starting: bool = False) -> dict[str, Any]:
        assert self.process.stdout is not None
        end, end_cpu = time.monotonic() + HANG_SECONDS, self._cpu_seconds() + HANG_CPU_SECONDS
        while starting or (time.monotonic() < end and self._cpu_seconds() < end_cpu):
            if select.select([self.process.stdout], [], [], 1)[0]:
                line = self.process.stdout.readline()
                return json.loads(line) if line else {"outcome": "crash", "message": self._describe_end(), "kind": "?"}
        return {"outcome": "crash", "message": "no result", "kind": "?"}

    def _describe_end(self) -> str:
        """Return how the worker ended, and the end of what it wrote to standard error."""
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        size = os.fstat(self.errors.fileno()).st_size
        return f"{name}: {os.pread(self.errors.fileno(), 2000, max(0, size - 2000)).decode(errors='replace')}"

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Progress:
    """The rows of all workers; writes problems and the number of rows to standard error."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.total = 0
        self.problems = 0
        self.lock = threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows.append(row)
            if row["outcome"] in PROBLEMS:
                self.problems += 1
                sys.stderr.write(f"\n{json.dumps(row)}\n")
            if len(self.rows) % 100 == 0 or len(self.rows) == self.total:
                sys.stderr.write(f"\r{len(self.rows)}/{self.total} files, {self.problems} problems")


def run_numbers(worker: Worker, numbers: list[int], progress: Progress, seed: int, smoke: bool) -> None:
    """Read the cases with one worker after another: a crash ends one."""
    for number in numbers:
        row = {"number": number} | worker.run(number)
        progress.add(row)
        if row["outcome"] == "crash":
            worker.close()
            worker = Worker(seed, smoke)
    worker.close()


def run_cases(numbers: list[int], seed: int, smoke: bool = False, jobs: int = 1) -> tuple[int, list[dict[str, Any]]]:
    """Read all valid files and then the cases; return the number of valid files and a row about each."""
    progress = Progress()
    with ThreadPoolExecutor(jobs) as pool:
        workers = list(pool.map(lambda _: Worker(seed, smoke), range(jobs)))
        valid, payloads = workers[0].valid, workers[0].payloads
        numbers = [*range(-1, -valid - payloads - 1, -1), *numbers]
        progress.total = len(numbers)
        parts = [
            pool.submit(run_numbers, worker, numbers[n::jobs], progress, seed, smoke)
            for n, worker in enumerate(workers)
        ]
        for part in parts:
            part.result()
    sys.stderr.write("\n")
    return valid, sorted(progress.rows, key=lambda row: row["number"])


# -- the table ---------------------------------------------------------------------------------------------------------


def format_table(valid: int, cases: list[dict[str, Any]], command: str, seconds: float) -> str:
    kinds: dict[str, Counter[str]] = {}
    for row in cases:
        kinds.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    lines = ["# Damaged files", "", f"Written by `{command}` in {seconds:.0f} s.", ""]
    lines += [f"{valid} valid files were read first; all of them must load.", ""]
    lines += ["| files | cases | refused | still valid | " + " | ".join(PROBLEMS) + " |"]
    lines += ["|---" * (4 + len(PROBLEMS)) + "|"]
    for kind, counts in [*sorted(kinds.items()), ("all", sum(kinds.values(), Counter[str]()))]:
        cells = [kind, sum(counts.values()), counts["refused"], counts["loaded"], *(counts[name] for name in PROBLEMS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", *_format_groups(cases), "", *_format_extremes(cases)]) + "\n"


def _format_groups(cases: list[dict[str, Any]]) -> list[str]:
    """Return a table with the number of damaged files of each group, and of payloads."""
    counts = Counter(row.get("group", "?") for row in cases)
    payloads = sum(row["kind"].startswith("payload") for row in cases)
    rows = [(name, counts[name], wanted) for name, (_, wanted) in GROUPS.items()]
    lines = ["| damaged file | cases | at least in 20,000 |", "|---|---|---|"]
    return lines + [f"| {name} | {count} | {wanted} |" for name, count, wanted in [*rows, ("payload", payloads, 60)]]


def _format_extremes(cases: list[dict[str, Any]]) -> list[str]:
    """Return sentences about the slowest and largest cases, the programs and the guards."""

    def largest(name: str, with_child: bool) -> float:
        return max([row[name] for row in cases if name in row and row["has_child"] == with_child], default=0)

    programs = Counter(name for row in cases for name in row.get("programs", ()))
    forked = sum(len(row["programs"]) for row in cases if row.get("forked"))
    guarded, repeated = sum("guarded" in row for row in cases), sum(row.get("tries", 1) > 1 for row in cases)
    alone, child = (
        f"{largest('alone', with_child):.2f} s ({largest('seconds', with_child):.2f} s of processor time, "
        f"{largest('wall', with_child):.2f} s on the clock of a busy machine)"
        for with_child in (False, True)
    )
    started = ", ".join(f"{name} {count} times" for name, count in sorted(programs.items())) or "none"
    return [
        f"Slowest case: {alone}; with a process of its own: {child}.",
        f"Cases that were over their time and were read again: {repeated}.",
        f"Largest growth of the worker: {max(largest('mb', False), largest('mb', True))} MB; "
        f"largest process that it started: {largest('child_mb', True)} MB in all.",
        f"Programs of the package that were started: {started}, of which {forked} times in a fork of the worker. "
        "Other programs are counted under “outside”.",
        f"Errors that only the guard at a reader's door turned into a FileError: {guarded}.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="the number of worker processes")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name} in benchmarks/results")
    parser.add_argument("--log", type=Path, help="write a line about each case to this file")
    parser.add_argument("--smoke", action="store_true", help=f"read {SMOKE_CASES} damaged files, and no pickles")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        from _file_worker import work

        work(args.seed, args.smoke)
        return 0
    start = time.perf_counter()
    count = SMOKE_CASES if args.smoke else args.cases
    valid, rows = run_cases(list(range(args.first, args.first + count)), args.seed, args.smoke, args.jobs)
    cases = [row for row in rows if not -valid <= row["number"] < 0]
    if args.log is not None:
        args.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"python benchmarks/reliability/files.py --cases {count} --seed {args.seed} --jobs {args.jobs}"
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
