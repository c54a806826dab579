"""Decode with one model in eight threads at once, in child processes; none may crash or give another text.

Each run builds a new model, so that the threads meet while an optimized model builds what it needs: the
tables of positions, the operators of a beam search and the quantized copy that proposes tokens. Each text must be that
of the same request alone.

    python benchmarks/reliability/threads.py --runs 200
    python benchmarks/reliability/threads.py --runs 20 --sanitize thread
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _sanitizer import build_kernels, make_environment, use_environment

import monoblock as mb
from monoblock.inference import fast_modules

RUNS_PER_PROCESS = 20
TIMEOUT = 900  # seconds for the runs of one process, so that a deadlock is found
SIZES: dict[str, Any] = {"vocab": 31, "width": 24, "depth": 2, "heads": 3, "context": 300}
MODELS = {
    "rotary": mb.llama(**SIZES, kv_heads=3, hidden=40),
    "alibi": mb.vary(mb.gpt(**SIZES), positions="alibi"),
    "buckets": mb.t5(**SIZES, hidden=40),
    "sinusoid": mb.vaswani(**SIZES),
}


def build_model(config: mb.ModelConfig, seed: int) -> mb.OptimizedModel:
    torch.manual_seed(seed)
    return mb.optimize(mb.Transformer(config).eval())


def decode(model: mb.OptimizedModel, number: int) -> list[list[int]]:
    """Decode request `number`, whose length and method differ from those of the other threads."""
    ids = torch.arange(3, 6 + 3 * number)[None] % 31
    options: dict[str, Any] = [{}, {"num_beams": 3}, {"draft": "8-bit"}, {"temperature": 0.9, "seed": number}][
        number % 4
    ]
    if model.config.encoder is not None:
        options.pop("draft", None)
    result: list[list[int]] = model.generate(ids, max_new_tokens=4 + 9 * number, **options).tolist()
    return result


def run_threads(first: int, last: int, threads: int) -> None:
    use_environment()
    fast_modules.MIN_NATIVE_WEIGHTS = 0  # use the kernels for these small models too
    torch.set_num_threads(1)
    for run in range(first, last):
        name = list(MODELS)[run % len(MODELS)]
        print(json.dumps([run, name, "crash"]), flush=True)
        alone = [decode(build_model(MODELS[name], run), number) for number in range(threads)]
        model, barrier = build_model(MODELS[name], run), threading.Barrier(threads)

        def decode_with_the_others(number: int, model: Any = model, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return decode(model, number)

        with ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(decode_with_the_others, range(threads)))
        print(json.dumps([run, name, "equal" if together == alone else "different"]), flush=True)


def run_child(words: list[str], environment: dict[str, str]) -> tuple[int | str, str, str]:
    """Return the exit code of a child process, or "a hang", with its output and errors."""
    command = [sys.executable, __file__, *words]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as problem:
        return "a hang", (problem.stdout or b"").decode(), ""
    return done.returncode, done.stdout, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="make 4 runs")
    parser.add_argument("--sanitize", choices=["thread"], help="build the kernels with this sanitizer")
    parser.add_argument("--kernels", type=Path, help="kernels built with the sanitizer before")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_threads(*options.child, options.threads)
    problems: list[str] = []
    equal, first, runs = 0, 0, 4 if options.smoke else options.runs
    with tempfile.TemporaryDirectory() as folder:
        kernels = options.kernels
        if options.sanitize and kernels is None:
            kernels = build_kernels(options.sanitize, Path(folder))
        environment = make_environment(options.sanitize, kernels)
        while first < runs:
            last = min(runs, first + RUNS_PER_PROCESS)
            words = ["--threads", str(options.threads), "--child", str(first), str(last)]
            code, output, errors = run_child(words, environment)
            lines = [json.loads(line) for line in output.splitlines()]
            equal += sum(outcome == "equal" for _, _, outcome in lines)
            problems += [f"run {run} of {name}: {outcome}" for run, name, outcome in lines if outcome == "different"]
            first = last
            if code:
                run, name, _ = lines[-1] if lines else (first, "", "")
                problems.append(f"run {run} of {name}: {code}: {errors[-3000:]}")
                first = run + 1 if lines else last
    for problem in problems:
        print(problem)
    print(json.dumps({"runs": runs, "threads": options.threads, "equal": equal, "failed": len(problems)}))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
