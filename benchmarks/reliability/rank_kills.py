"""Kill processes of runs in several processes at random moments, and compare the resumed runs with undisturbed ones.

For each strategy a tiny run is started with `monoblock train --nproc`. A random rank is ended with SIGKILL at a random
moment: during the start, a step, a save or an evaluation. Required are: one line on the terminal that names the
process, the end of the command and of all processes within 60 seconds, and an intact newest checkpoint. Then the run is
started again with --resume and the next process is killed, until the run may end. Its metrics, its final model and
every tensor of its last checkpoint must be bit for bit those of a run that was left alone.

--smoke kills two processes of one strategy; --write saves the table.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

import monoblock
from monoblock.runs.run_folder import has_run
from monoblock.training import checkpoint
from monoblock.training.events import METRICS_FILE, read_metrics

RESULTS = Path(__file__).parents[1] / "results" / "rank-kills.md"
STRATEGIES = {"ddp": (2, 10), "fsdp": (2, 10), "tp": (2, 8), "pp": (2, 8), "fsdp+tp": (4, 4)}  # processes, kills
STEPS, SAVE_EVERY, EVAL_EVERY = 90, 4, 7
START_SHARE, START_SECONDS = 0.2, 6.0  # the share of kills during the start, and how long it takes
LIMIT_SECONDS = 60.0
NO_CHECKPOINT = "warning: the run has no checkpoint yet"  # expected, if the run was killed before the first save
# The vocabulary of 37 cannot be divided evenly.
RECIPE = f"""
data = {{ corpus = "CORPUS" }}
tokenizer = {{ kind = "char" }}
model = {{ family = "gpt", vocab = 37, width = 24, depth = 2, heads = 4, context = 13, dropout = 0.1 }}
train = {{ steps = {STEPS}, batch = 6, warmup = 3, save_every = {SAVE_EVERY}, eval_every = {EVAL_EVERY}, DEVICE }}
parallel = {{ tensor = TENSOR, timeout = 60.0 }}
"""


@dataclass
class Result:
    strategy: str
    processes: int
    kills: dict[str, int] = field(default_factory=dict)  # by what the run was doing
    slowest: float = 0.0  # seconds from the kill to the end of the command
    problems: list[str] = field(default_factory=list)


def write_recipe(folder: Path, strategy: str, background: bool) -> Path:
    rng = random.Random(3)
    words = [rng.choice(("and", "the", "king", "said", "unto", "them", "go", "up")) for _ in range(1500)]
    (folder / "text.txt").write_text(" ".join(words), encoding="utf-8")
    tensor = {"fsdp+tp": 2}.get(strategy, 0)
    train = f'eval_batches = 4, device = "cpu", parallel = "{strategy}", save_async = {str(background).lower()}'
    text = RECIPE.replace("CORPUS", str(folder / "text.txt")).replace("TENSOR", str(tensor)).replace("DEVICE", train)
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def launch(recipe: Path, out: Path, processes: int) -> subprocess.Popen[bytes]:
    """Start or resume a run, with its output in a file beside its folder."""
    resume = ["--resume"] if has_run(out) else []
    words = ["train", str(recipe), "--out", str(out), "--nproc", str(processes), *resume]
    environment = os.environ | {"PYTHONPATH": str(Path(monoblock.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with open(terminal_file(out), "wb") as terminal:
        return subprocess.Popen(
            [sys.executable, "-m", "monoblock", *words],
            env=environment,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )


def terminal_file(out: Path) -> Path:
    return out.with_suffix(".log")


def child_processes(launcher: int) -> dict[int, int]:
    """Return the process id of each rank that runs."""
    ranks = {}
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for child in children:
            for word in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if word.startswith(b"RANK="):
                    ranks[int(word[5:])] = int(child)
    except OSError:  # one has just ended
        return {}
    return ranks


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last_step(out: Path) -> int:
    path = out / METRICS_FILE
    return len([line for line in path.read_bytes().splitlines() if b'"loss"' in line]) if path.exists() else 0


def describe_moment(out: Path) -> str:
    """Return what a run is doing, as far as its files show."""
    if any((out / "checkpoints").glob("*.tmp")):
        return "save"
    step = last_step(out)
    return "start" if step == 0 else "evaluation" if step % EVAL_EVERY == 0 else "step"


def wait_for_moment(process: subprocess.Popen[bytes], out: Path, processes: int, rng: random.Random) -> bool:
    """Wait for a random moment of a run that has just been started; return False if the run ended before."""
    deadline = time.monotonic() + 120
    while len(child_processes(process.pid)) < processes and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if rng.random() < START_SHARE:
        time.sleep(rng.random() * START_SECONDS)
        return process.poll() is None
    before = len((out / METRICS_FILE).read_bytes()) if (out / METRICS_FILE).exists() else 0
    while process.poll() is None and time.monotonic() < deadline:  # until the first step after the resume
        size = len((out / METRICS_FILE).read_bytes()) if (out / METRICS_FILE).exists() else 0
        if size > 0 and size != before:
            break
        time.sleep(0.002)
    step, kind = last_step(out), rng.choice(("any", "save", "evaluation"))
    target = step + rng.randrange(1, 6)
    target += -target % {"any": 1, "save": SAVE_EVERY, "evaluation": EVAL_EVERY}[kind]
    while process.poll() is None and last_step(out) < target and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(rng.random() * 0.02)
    return process.poll() is None


def kill_once(recipe: Path, out: Path, result: Result, rng: random.Random) -> bool:
    """Start or resume a run and kill one of its processes; return False if the run ended before."""
    process = launch(recipe, out, result.processes)
    if not wait_for_moment(process, out, result.processes, rng):
        process.wait(LIMIT_SECONDS)
        return False
    ranks, moment = child_processes(process.pid), describe_moment(out)
    if len(ranks) < result.processes:
        process.wait(LIMIT_SECONDS)
        return False
    rank = rng.choice(sorted(ranks))
    start = time.monotonic()
    os.kill(ranks[rank], signal.SIGKILL)
    try:
        code = process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        result.problems.append(f"{moment}: still running after {LIMIT_SECONDS:.0f} s")
        for pid in [*ranks.values(), process.pid]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        return True
    result.slowest = max(result.slowest, time.monotonic() - start)
    result.kills[moment] = result.kills.get(moment, 0) + 1
    text = terminal_file(out).read_text(encoding="utf-8", errors="replace").replace(NO_CHECKPOINT, "")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    named = [line for line in errors if f"process {rank} was ended by signal 9" in line]
    if code == 0 and "Saved" in text:  # the rank had done its work
        return False
    checks = {
        f"exit code {code}": code == 1,
        f"lines on the terminal: {errors}": len(errors) == len(named) == 1,
        f"a traceback or a warning: {text[-600:]}": "Traceback" not in text and "warning" not in text.lower(),
        "a process outlived the command": not any(map(is_alive, ranks.values())),
        f"problems of checkpoints: {checkpoint.find_newest(out / 'checkpoints')[1]}": not checkpoint.find_newest(
            out / "checkpoints"
        )[1],
    }
    result.problems += [f"{moment}, rank {rank}: {name}" for name, passed in checks.items() if not passed]
    return True


def run_to_end(recipe: Path, out: Path, processes: int) -> str | None:
    """Start or resume a run and wait until it ends; return a problem, or None."""
    try:
        code = launch(recipe, out, processes).wait(600)
    except subprocess.TimeoutExpired:
        return "the run does not end"
    text = terminal_file(out).read_text(encoding="utf-8", errors="replace")
    if code == 0 and "step-" in text and not any(word in text for word in ("Traceback", "skipped a checkpoint")):
        return None
    return f"exit code {code}: {text[-600:]}"


def is_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same bytes; the state of Python's generator has a NaN."""
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(raw[0], raw[1])


def differences(actual: Path, expected: Path) -> list[str]:
    """Return what differs between two finished runs."""
    found = []
    lines = [[{**line, "seconds": 0} for line in read_metrics(folder)] for folder in (actual, expected)]
    if lines[0] != lines[1]:
        found.append("the metrics differ")
    digests = [hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() for folder in (actual, expected)]
    if digests[0] != digests[1]:
        found.append("the final models differ")
    ends = [checkpoint.load(folder / f"checkpoints/step-{STEPS}").tensors for folder in (actual, expected)]
    for group, tensors in ends[1].items():
        different = [name for name, tensor in tensors.items() if not is_equal(tensor, ends[0][group][name])]
        found += [f"{group}: {len(different)} tensors differ, such as {different[0]}"] if different else []
    left = [path.name for path in (actual / "checkpoints").iterdir() if path.suffix in (".tmp", ".stale")]
    return found + ([f"left over: {left}"] if left else [])


def test_strategy(strategy: str, processes: int, kills: int, seed: int, background: bool, folder: Path) -> Result:
    result, rng = Result(strategy, processes), random.Random(f"{strategy} {seed}")
    recipe, expected, out = write_recipe(folder, strategy, background), folder / "undisturbed", folder / "run"
    problem = run_to_end(recipe, expected, processes)
    if problem is not None:
        result.problems.append(f"undisturbed: {problem}")
        return result
    done = 0
    while done < kills:
        met = kill_once(recipe, out, result, rng)
        done += met
        print(f"{strategy}: {done} of {kills} kills, step {last_step(out)}, {result.problems}", flush=True)
        if not met:  # it ended: compare, and begin again
            result.problems += differences(out, expected)
            shutil.rmtree(out)
    problem = run_to_end(recipe, out, processes)
    result.problems += differences(out, expected) if problem is None else [problem]
    return result


def render(results: list[Result], seconds: float) -> str:
    lines = [
        "# Killed processes",
        "",
        f"Written by `python {shlex.join(sys.argv)}` on {date.today()} in {seconds:.0f} s, commit {commit()}.",
        "",
        f"{sum(sum(result.kills.values()) for result in results)} processes were ended with SIGKILL. After each kill, "
        "the command must end within 60 s with one line, no process may be left, and the newest checkpoint must be "
        "intact. The resumed run must end with the metrics, the model and every tensor of the last checkpoint of an "
        "undisturbed run, bit for bit.",
        "",
        "| strategy | processes | start | step | save | evaluation | slowest end | problems |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        moments = [str(result.kills.get(moment, 0)) for moment in ("start", "step", "save", "evaluation")]
        row = [result.strategy, str(result.processes), *moments, f"{result.slowest:.1f} s", str(len(result.problems))]
        lines.append(f"| {' | '.join(row)} |")
    problems = [f"- {result.strategy}: {problem}" for result in results for problem in result.problems]
    return "\n".join([*lines, *(["", *problems] if problems else []), ""])


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", choices=STRATEGIES, help="only this strategy")
    parser.add_argument("--async", dest="background", action="store_true", help="with train.save_async = true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    start, results = time.monotonic(), []
    chosen = {args.strategy: STRATEGIES[args.strategy]} if args.strategy else STRATEGIES
    for strategy, (processes, kills) in {"fsdp": (2, 2)}.items() if args.smoke else chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            results.append(test_strategy(strategy, processes, kills, args.seed, args.background, Path(folder)))
    report = render(results, time.monotonic() - start)
    print(report)
    if args.write and not args.smoke:
        RESULTS.write_text(report, encoding="utf-8")
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
