"""`monoblock bench [MODEL|PRESET]`: how fast text is read and made on this machine, beside the peers that are here."""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, human_bytes, next_verb, print_json, table
from monoblock.cli.speaking import where
from monoblock.errors import ConfigError, did_you_mean, with_article

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
COLUMNS = ("runner", "prefill tok/s", "decode tok/s", "ms a token", "weights", "peak memory")


@click.command(name="bench", help="Tokens per second and memory of WHAT (a model folder or a preset), beside peers.")
@click.argument("what", default="gpt2")
@click.option("--prompt", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to read.")
@click.option("--new", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens to make after that.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Texts at once.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="The median of so many.")
@click.option("--only", multiple=True, help="Run these alone; may be given several times.")
@click.option("--no-peers", is_flag=True, help="Run this package alone.")
@click.option("--device", help="cpu, cuda …  [the best there is]")
@click.option("--dtype", help="fp32, bf16, fp16.  [bf16 on a GPU that has it, else fp32]")
@as_json
def command(
    what: str,
    prompt: int,
    new: int,
    batch: int,
    rounds: int,
    only: tuple[str, ...],
    no_peers: bool,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    names = _named(only, no_peers)
    model = _model(what, device, dtype, prompt + new + 1)
    with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
        found = measured(model, Path(folder), names, prompt, new, batch, rounds)
    found = {"model": what} | found
    if as_json:
        print_json(found)
    else:
        report(found)
    next_verb(f"account {shlex.quote(what)} --batch {batch} --length {prompt + new}")


def _named(only: tuple[str, ...], alone: bool) -> list[str]:
    from monoblock.cli.peers import PLAIN, RUNNERS

    for name in only:
        if name not in RUNNERS:
            listed = ", ".join(RUNNERS)
            raise ConfigError(f"there is no runner {name!r}{did_you_mean(name, RUNNERS)}; there is {listed}")
    names = list(only) or PLAIN
    return [name for name in names if name.startswith("monoblock")] if alone else names


def _model(what: str, device: str | None, dtype: str | None, length: int) -> Any:
    """A preset with random weights, or the model of a folder."""
    import torch

    from monoblock.model import Transformer
    from monoblock.presets import PRESETS, preset

    place, form = where(device, dtype)
    if Path(what).exists():
        model = Transformer.from_pretrained(what, device=place, dtype=form)
        _check(model.config, length)
    elif what in PRESETS:
        _check(preset(what), length)
        click.echo(f"building {what} with random weights", err=True)
        torch.manual_seed(0)
        model = Transformer(preset(what)).to(device=place, dtype=form)
    else:
        raise ConfigError(f"{what!r} is neither a model folder nor a preset{did_you_mean(what, PRESETS)}")
    return model.eval()


def _check(config: Any, length: int) -> None:
    if config.decoder is None or config.head is None or config.head.kind != "language_model":
        kind = with_article(config.family)
        raise ConfigError(f"{kind} model makes no text to be timed; give a decoder, such as gpt2")
    if config.context is not None and length > config.context:
        raise ConfigError(f"--prompt and --new make {length} tokens and the context is {config.context}; lower them")


def measured(
    model: Any,
    folder: Path,
    names: list[str],
    prompt: int,
    new: int,
    batch: int,
    rounds: int,
    texts: list[list[list[int]]] | None = None,
) -> dict[str, Any]:
    """Every runner in turn, round after round, so that none has the quieter machine; a round has one of the texts."""
    import torch

    from monoblock.accounting.report import account
    from monoblock.cli.peers import RUNNERS, Absent, Bench, exported

    device = str(next(model.parameters()).device)
    peers = [name for name in names if not name.startswith("monoblock")]
    why = exported(model, folder) if peers else None
    given = Bench(model, folder, device, torch.get_num_threads())
    runners, absent = {}, {}
    for name in names:
        try:
            if name in peers and why is not None:
                raise Absent(why)
            click.echo(f"making {name} ready", err=True)
            runners[name] = RUNNERS[name](given)
        except Absent as problem:
            absent[name] = str(problem)
    vocabulary = min(part.vocab for part in model.config.inputs.values() if hasattr(part, "vocab"))
    drawn = torch.randint(1, vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(1)).tolist()
    times = _times(runners, texts or [drawn], new, rounds, torch.device(device))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "device": device,
        "dtype": dtype,
        "threads": given.threads,
        "torch": torch.__version__,
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "rounds": rounds,
        "kv_cache_bytes": account(model.config).kv_cache_bytes(batch, prompt + new, SHORT[dtype]),
        "runners": {
            name: _row(times[name], runner.bytes, prompt * batch, new * batch) for name, runner in runners.items()
        },
        "absent": absent,
    }


def _times(runners: dict[str, Any], texts: list[list[list[int]]], new: int, rounds: int, device: Any) -> dict[str, Any]:
    """Of each runner the seconds for the first token, for all of them, and the most memory it took on a GPU."""
    import torch

    found: dict[str, Any] = {name: {"first": [], "all": [], "peak": None} for name in runners}
    for turn in range(rounds + 1):  # the first one warms up
        click.echo("warming up" if not turn else f"round {turn} of {rounds}", err=True)
        for name, runner in runners.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            for what, count in (("first", 1), ("all", new + 1)):
                begun = time.perf_counter()
                runner.run(texts[turn % len(texts)], count)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:
                    found[name][what].append(time.perf_counter() - begun)
            if device.type == "cuda":
                found[name]["peak"] = torch.cuda.max_memory_allocated(device)
    return found


def _row(times: dict[str, Any], size: int, read: int, made: int) -> dict[str, Any]:
    first, whole = statistics.median(times["first"]), statistics.median(times["all"])
    return {
        "prefill_tokens_per_second": read / first,
        "decode_tokens_per_second": made / (whole - first) if whole > first else None,  # None: lost in the noise
        "seconds_first": first,
        "seconds_all": whole,
        "weight_bytes": size,
        "peak_bytes": times["peak"],
    }


def _speed(rate: float | None, batch: int) -> tuple[float | None, float | None]:
    """Tokens a second, and the milliseconds that one more token takes."""
    return (None, None) if rate is None else (round(rate, 1), round(1000 * batch / rate, 2))


def report(found: dict[str, Any]) -> None:
    texts = f"{found['batch']} texts" if found["batch"] > 1 else "one text"
    click.echo(
        f"{found['model']}, {found['dtype']} on {found['device']}, {found['threads']} threads, torch {found['torch']}: "
        f"{texts}, {found['prompt']} tokens read and {found['new']} made, "
        f"keys and values {human_bytes(found['kv_cache_bytes'])}"
    )
    rows = [
        (
            name,
            round(row["prefill_tokens_per_second"], 1),
            *_speed(row["decode_tokens_per_second"], found["batch"]),
            human_bytes(row["weight_bytes"]),
            "" if row["peak_bytes"] is None else human_bytes(row["peak_bytes"]),
        )
        for name, row in found["runners"].items()
    ]
    table(COLUMNS, rows)
    for name, why in found["absent"].items():
        click.echo(f"{name}: {why}", err=True)
