"""`monoblock bench [MODEL|PRESET]`: measure decoding speed and memory, and compare with other libraries."""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.model_options import DTYPES, device_option, dtype_option, resolve_device
from monoblock.cli._shared.output import format_bytes, json_option, print_json, print_table, suggest_next
from monoblock.errors import ConfigError, did_you_mean, with_article

if TYPE_CHECKING:
    from monoblock.cli._shared.bench_runners import BenchSetup, Runner
    from monoblock.config.model import ModelConfig
    from monoblock.nn.transformer import Transformer

DTYPE_NAMES = {name: short for short, name in DTYPES.items()}
DEFAULT_PROMPT, DEFAULT_NEW = 32, 64  # tokens
COLUMNS = ("runner", "prefill tok/s", "decode tok/s", "ms per token", "weights", "peak memory")


@click.command(
    name="bench",
    help="Measure the tokens per second and the memory of WHAT: a model folder, or a preset, which gets random weights "
    "(default: gpt2). Other installed libraries that can run the same weights are measured for comparison.",
)
@click.argument("what", default="gpt2")
@click.option(
    "--prompt", type=click.IntRange(min=1), help="Tokens in the prompt.  [default: 32, less if the context is short]"
)
@click.option(
    "--new", type=click.IntRange(min=1), help="Tokens to generate.  [default: 64, less if the context is short]"
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences in a batch.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Repetitions; the median is reported."
)
@click.option(
    "--only",
    multiple=True,
    help="Measure only this runner, such as transformers or 'monoblock, 8 bits'; may be repeated.",
)
@click.option("--no-peers", is_flag=True, help="Measure monoblock alone, without other libraries.")
@device_option
@dtype_option
@json_option
def command(
    what: str,
    prompt: int | None,
    new: int | None,
    batch: int,
    rounds: int,
    only: tuple[str, ...],
    no_peers: bool,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    names = _select_runners(only, no_peers)
    model, prompt, new = _load_model(what, device, dtype, prompt, new)
    with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
        report = {"model": what} | measure_runners(model, Path(folder), names, prompt, new, batch, rounds)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    suggest_next(f"account {shlex.quote(what)} --batch {batch} --length {prompt + new}")


def _select_runners(only: tuple[str, ...], only_monoblock: bool) -> list[str]:
    from monoblock.cli._shared.bench_runners import DEFAULT_RUNNERS, RUNNERS

    for name in only:
        if name not in RUNNERS:
            raise ConfigError(f"there is no runner {name!r}; write one of {list(RUNNERS)}{did_you_mean(name, RUNNERS)}")
    names = list(only) or DEFAULT_RUNNERS
    return [name for name in names if name.startswith("monoblock")] if only_monoblock else names


def _load_model(
    what: str, device: str | None, dtype: str | None, prompt: int | None, new: int | None
) -> tuple[Transformer, int, int]:
    """Load a model folder, or build a preset with random weights; return it, and the lengths of prompt and new text."""
    import torch

    from monoblock.config.presets import PRESETS, preset
    from monoblock.nn.transformer import Transformer

    device, torch_dtype = resolve_device(device, dtype)
    if Path(what).exists():
        model = Transformer.from_pretrained(what, device=device, dtype=torch_dtype)
        lengths = _choose_lengths(model.config, prompt, new)
    elif what in PRESETS:
        lengths = _choose_lengths(preset(what), prompt, new)
        click.echo(f"building {what} with random weights", err=True)
        torch.manual_seed(0)
        model = Transformer(preset(what)).to(device=device, dtype=torch_dtype)
    else:
        raise ConfigError(
            f"{what!r} is neither a model folder nor a preset (see `monoblock ls presets`){did_you_mean(what, PRESETS)}"
        )
    return model.eval(), *lengths


def _choose_lengths(config: ModelConfig, prompt: int | None, new: int | None) -> tuple[int, int]:
    """Return the number of tokens in the prompt and the number of new ones; raise unless the context holds them."""
    if config.decoder is None or config.head is None or config.head.kind != "language_model":
        raise ConfigError(f"{with_article(config.family)} model generates no text; give a language model, such as gpt2")
    context = config.context
    if prompt is None:
        prompt = DEFAULT_PROMPT if context is None else max(1, min(DEFAULT_PROMPT, context // 3))
    if new is None:
        new = DEFAULT_NEW if context is None else max(1, min(DEFAULT_NEW, context - prompt - 1))
    length = prompt + new + 1  # the warm-up generates one token more
    if context is not None and length > context:
        raise ConfigError(
            f"--prompt and --new need a context of {length} tokens, but this model has {context}; lower them"
        )
    return prompt, new


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
    import torch

    from monoblock.accounting.report import account
    from monoblock.cli._shared.bench_runners import BenchSetup

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
    from monoblock.cli._shared.bench_runners import RUNNERS, RunnerUnavailable, export_for_peers

    peers = [name for name in names if not name.startswith("monoblock")]
    export_problem = export_for_peers(setup.model, setup.folder) if peers else None
    runners, unavailable = {}, {}
    for name in names:
        try:
            if name in peers and export_problem is not None:
                raise RunnerUnavailable(export_problem)
            click.echo(f"preparing {name}", err=True)
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
        click.echo("warming up" if not round_number else f"round {round_number} of {rounds}", err=True)
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
    import torch

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


def _decode_speed(rate: float | None, batch: int) -> tuple[float | None, float | None]:
    """Round `rate`, the tokens per second of a whole batch; return it, and the milliseconds per token of a sequence."""
    return (None, None) if rate is None else (round(rate, 1), round(1000 * batch / rate, 2))


def print_report(report: dict[str, Any]) -> None:
    sequences = f"{report['batch']} sequences" if report["batch"] > 1 else "one sequence"
    click.echo(
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['threads']} threads, "
        f"torch {report['torch']}: {sequences}, {report['prompt']} prompt tokens and {report['new']} new tokens, "
        f"key/value cache {format_bytes(report['kv_cache_bytes'])}"
    )
    rows = [
        (
            name,
            round(row["prefill_tokens_per_second"], 1),
            *_decode_speed(row["decode_tokens_per_second"], report["batch"]),
            format_bytes(row["weight_bytes"]),
            "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
        )
        for name, row in report["runners"].items()
    ]
    print_table(COLUMNS, rows)
    for name, reason in report["absent"].items():
        click.echo(f"{name}: {reason}", err=True)
