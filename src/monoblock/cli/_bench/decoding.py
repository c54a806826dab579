"""Time prefill and decoding of a model in this package and in other libraries."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from monoblock.accounting.report import account
from monoblock.cli._shared.bench_runners import RUNNERS, BenchSetup, Runner, RunnerUnavailable, export_for_peers
from monoblock.cli._shared.model_options import DTYPES
from monoblock.cli._shared.output import echo
from monoblock.model import Transformer

DTYPE_NAMES = {name: short for short, name in DTYPES.items()}


def measure_runners(
    model: Transformer,
    folder: Path,
    names: list[str],
    prompt: int,
    new: int,
    batch: int,
    rounds: int,
    prompts: list[list[list[int]]] | None = None,
) -> dict[str, Any]:
    """Time the named runners and return the report as `--json` prints it.

    folder: the folder to which the model is exported, for other libraries to load.
    prompt, new: the number of tokens in a prompt, and the number of tokens to generate.
    prompts: batches of token ids, of which each round uses the next; None uses one random batch (batch, prompt).
    """
    parameter = next(iter(model.parameters()))
    setup = BenchSetup(model, folder, str(parameter.device), torch.get_num_threads())
    runners, unavailable = _build_runners(setup, names)
    vocabulary = min(part.vocab for part in model.config.inputs.values() if hasattr(part, "vocab"))
    random_batch = torch.randint(1, vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    times, failed = _time_runners(runners, prompts or [random_batch], new, rounds, parameter.device)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return {
        "device": setup.device,
        "dtype": dtype,
        "threads": setup.threads,
        "torch": torch.__version__,
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "rounds": rounds,
        "kv_cache_bytes": account(model.config).kv_cache_bytes(batch, prompt + new, DTYPE_NAMES[dtype]),
        "runners": {
            name: _summarize_times(times[name], runner.weight_bytes, prompt * batch, new * batch)
            for name, runner in runners.items()
            if name in times
        },
        "absent": unavailable | failed,
    }


def _build_runners(setup: BenchSetup, names: list[str]) -> tuple[dict[str, Runner], dict[str, str]]:
    """Build the named runners; return them by name, and for each one that is not available the reason."""
    peers = [name for name in names if not name.startswith("monoblock")]
    export_problem = export_for_peers(setup.model, setup.folder) if peers else None
    runners, unavailable = {}, {}
    for name in names:
        try:
            if name in peers and export_problem is not None:
                raise RunnerUnavailable(export_problem)
            echo(f"preparing {name}", err=True)
            runners[name] = RUNNERS[name](setup)
        except RunnerUnavailable as problem:
            unavailable[name] = str(problem)
        except Exception as problem:
            if name not in peers:
                raise
            unavailable[name] = _failure(problem)
    return runners, unavailable


def _failure(problem: Exception) -> str:
    """Return one line about the error of another library."""
    return f"failed with {type(problem).__name__}: {' '.join(str(problem).split())[:200]}"


def _time_runners(
    runners: dict[str, Runner], prompts: list[list[list[int]]], new: int, rounds: int, device: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Time the runners; return for each its seconds to the first token and to all tokens by round, and its peak memory.

    The runners take turns within a round, so that a change in the load of the machine affects all of them. The peak
    memory is that of the GPU; it is None on a CPU. The second result has the error of each other library that failed.
    """
    times: dict[str, Any] = {name: {"first": [], "all": [], "peak": None} for name in runners}
    failed: dict[str, str] = {}
    for round_number in range(rounds + 1):
        echo("warming up" if not round_number else f"round {round_number} of {rounds}", err=True)
        for name in list(times):
            try:
                seconds, peak = _time_once(runners[name], prompts[round_number % len(prompts)], new, device)
            except Exception as problem:
                if name.startswith("monoblock"):
                    raise
                failed[name] = _failure(problem)
                del times[name]
                continue
            times[name]["peak"] = peak
            for key, value in seconds.items() if round_number else ():
                times[name][key].append(value)
    return times, failed


def _time_once(runner: Runner, prompts: list[list[int]], new: int, device: Any) -> tuple[dict[str, float], int | None]:
    """Return the seconds to the first token and to all tokens, and the peak memory on a GPU."""
    is_gpu, seconds = device.type == "cuda", {}
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for key, count in (("first", 1), ("all", new + 1)):
        start = time.perf_counter()
        runner.run(prompts, count)
        if is_gpu:
            torch.cuda.synchronize(device)
        seconds[key] = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated(device) if is_gpu else None


def _summarize_times(times: dict[str, Any], weight_bytes: int, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    first, total = statistics.median(times["first"]), statistics.median(times["all"])
    return {
        "prefill_tokens_per_second": prompt_tokens / first,
        "decode_tokens_per_second": new_tokens / (total - first) if total > first else None,  # too short to measure
        "seconds_first": first,
        "seconds_all": total,
        "weight_bytes": weight_bytes,
        "peak_bytes": times["peak"],
    }
