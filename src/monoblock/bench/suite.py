"""One table of all that is measured on this machine: ours beside installed peers, with the fraction of a ceiling.

Training, prefill and translation are compared with the speed of a large matrix product, by the FLOPs that they need;
decoding with the speed of reading memory, since every new token reads all weights.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monoblock.accounting.report import account
from monoblock.bench.generation import DEFAULT_RUNNERS, Progress, measure_runners
from monoblock.bench.startup import PROGRAMS, time_startup
from monoblock.bench.training import OURS, Ceilings, build_models, measure_ceilings, time_models
from monoblock.bench.translation import BEAMS, NEW, TRANSLATORS, Shape, build_setup, random_sources, time_translators
from monoblock.config.model import ModelConfig
from monoblock.config.presets import preset, tiny
from monoblock.interop.gguf.writer import save_gguf
from monoblock.kernels.cpu.library import processor_name
from monoblock.model import Transformer

COLUMNS = ("task", "runner", "speed", "unit", "of monoblock", "of the ceiling", "ceiling")
MATRIX_PRODUCT, MEMORY = "matrix product", "memory"


class Row(NamedTuple):
    """One line of the table; `speed` is None where a runner could not run, and `note` has the reason."""

    task: str
    runner: str
    speed: float | None
    unit: str
    ceiling: str | None = None  # what limits the speed
    fraction: float | None = None  # of what the ceiling allows
    note: str | None = None


class Sizes(NamedTuple):
    """The shapes that are measured."""

    gpt: ModelConfig
    batch: int
    length: int  # tokens of a sequence in training
    prompt: int
    new: int
    translation: Shape
    sources: int
    startup: ModelConfig
    startup_kind: str  # how the GGUF file stores matrices


class Options(NamedTuple):
    device: str
    dtype: torch.dtype
    rounds: int
    is_small: bool
    with_peers: bool
    progress: Progress = lambda line: None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def select(self, names: Any) -> list[str]:
        return [name for name in names if self.with_peers or name.startswith(OURS)]


def choose_sizes(options: Options) -> Sizes:
    if options.is_small:
        toy = Shape(width=32, depth=1, heads=2, vocab=61)
        return Sizes(tiny("gpt2"), 2, 16, 8, 4, toy, 5, tiny("smollm2-135m"), "f32")
    is_gpu = torch.device(options.device).type == "cuda"
    batch, length = (16, 1024) if is_gpu else (2, 256)
    return Sizes(preset("gpt2"), batch, length, 256, 64, Shape(), 256, preset("smollm2-135m"), "q8_0")


# -- tasks --------------------------------------------------------------------------------------------------------


def training_rows(options: Options, sizes: Sizes, ceilings: Ceilings) -> Iterator[Row]:
    torch.manual_seed(0)
    models, absent = build_models(sizes.gpt, options.with_peers)
    for model in models.values():
        model.to(options.device, options.dtype)
    vocab = sizes.gpt.input.vocab  # type: ignore[union-attr]
    ids = torch.randint(0, vocab, (sizes.batch, sizes.length), device=options.device)
    seconds = time_models(models, ids, options.rounds)
    tokens = sizes.batch * sizes.length
    flops = account(sizes.gpt).flops(sizes.batch, sizes.length).training / tokens
    task = f"training, {sizes.batch} × {sizes.length}"
    for name, times in seconds.items():
        speed = tokens / statistics.median(times)
        yield Row(task, name, speed, "tokens/s", MATRIX_PRODUCT, speed * flops / ceilings.flops)
    yield from absent_rows(task, "tokens/s", absent)


def decoding_rows(options: Options, sizes: Sizes, ceilings: Ceilings) -> Iterator[Row]:
    torch.manual_seed(0)
    model = Transformer(sizes.gpt).to(options.device, options.dtype).eval()
    with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
        names = options.select(DEFAULT_RUNNERS)
        report = measure_runners(
            model, Path(folder), names, sizes.prompt, sizes.new, 1, options.rounds, progress=options.progress
        )
    flops = account(sizes.gpt).flops(1, sizes.prompt).forward / sizes.prompt
    prefill, decode = f"prefill, {sizes.prompt} tokens", f"decoding, {sizes.new} tokens"
    for name, row in report["runners"].items():
        speed = row["prefill_tokens_per_second"]
        yield Row(prefill, name, speed, "tokens/s", MATRIX_PRODUCT, speed * flops / ceilings.flops)
    yield from absent_rows(prefill, "tokens/s", report["absent"])
    for name, row in report["runners"].items():
        rate = row["decode_tokens_per_second"]
        fraction = None if rate is None else rate * row["weight_bytes"] / ceilings.bytes
        note = "too short to measure" if rate is None else None
        yield Row(decode, name, rate, "tokens/s", MEMORY, fraction, note)
    yield from absent_rows(decode, "tokens/s", report["absent"])


def translation_rows(options: Options, sizes: Sizes, ceilings: Ceilings) -> Iterator[Row]:
    rows = random_sources(sizes.sources, sizes.translation.vocab)
    with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
        setup = build_setup(Path(folder), sizes.translation, options.device, options.threads, options.dtype)
        result = time_translators(setup, options.select(TRANSLATORS), rows, options.rounds)
    flops = search_flops(setup.model.config, sum(map(len, rows)) // len(rows))
    task = f"translation, beam {BEAMS}"
    for name, seconds in result.seconds.items():
        speed = len(rows) / seconds
        yield Row(task, name, speed, "sentences/s", MATRIX_PRODUCT, speed * flops / ceilings.flops)
    yield from absent_rows(task, "sentences/s", result.absent)


def search_flops(config: ModelConfig, source_length: int) -> float:
    """Return the FLOPs of one search: the source is encoded once, and the decoder reads every token of every beam."""
    first, all_tokens = (account(config).flops(1, source_length, length).forward for length in (1, NEW))
    return first + (BEAMS * NEW - 1) * (all_tokens - first) / (NEW - 1)


def startup_rows(options: Options, sizes: Sizes, ceilings: Ceilings) -> Iterator[Row]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
        path = Path(folder) / "model.gguf"
        save_gguf(Transformer(sizes.startup), path, kind=sizes.startup_kind)
        names = options.select(PROGRAMS)
        best, absent = time_startup(path, names, options.rounds, options.device, options.threads)
    task, unit = "start-up to the first token", "s"
    yield from (Row(task, name, times[-1], unit) for name, times in best.items())
    yield from absent_rows(task, unit, absent)


def absent_rows(task: str, unit: str, absent: dict[str, str]) -> Iterator[Row]:
    return (Row(task, name, None, unit, note=reason) for name, reason in absent.items())


TASKS: dict[str, Callable[[Options, Sizes, Ceilings], Iterator[Row]]] = {
    "training": training_rows,
    "prefill and decoding": decoding_rows,
    "translation": translation_rows,
    "start-up": startup_rows,
}


# -- the table ----------------------------------------------------------------------------------------------------


def measure_all(options: Options) -> dict[str, Any]:
    """Measure every task, and return the report as `--json` prints it."""
    sizes = choose_sizes(options)
    options.progress("measuring the ceilings")
    ceilings = measure_ceilings(options.device, options.dtype, options.is_small)
    rows: list[Row] = []
    for name, measure in TASKS.items():
        options.progress(f"measuring {name}")
        rows += measure(options, sizes, ceilings)
    device = torch.device(options.device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "dtype": str(options.dtype).removeprefix("torch."),
        "threads": options.threads,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "is_small": options.is_small,
        "ceilings": {"flops_per_second": ceilings.flops, "bytes_per_second": ceilings.bytes},
        "rows": [row._asdict() | {"ratio": ratio_to_ours(row, rows)} for row in rows],
    }


def ratio_to_ours(row: Row, rows: list[Row]) -> float | None:
    """Return the speed of a runner relative to that of monoblock in the same task; below one, monoblock is faster."""
    ours = next((other.speed for other in rows if other.task == row.task and other.runner == OURS), None)
    if row.speed is None or ours is None:
        return None
    return ours / row.speed if row.unit == "s" else row.speed / ours


def describe(report: dict[str, Any]) -> str:
    """Return a line about the machine and its ceilings."""
    ceilings = report["ceilings"]
    sizes = "; toy sizes, whose speeds say nothing" if report["is_small"] else ""
    return (
        f"{report['device']}, {report['threads']} threads, torch {report['torch']}, {report['dtype']}; "
        f"{ceilings['flops_per_second'] / 1e9:,.0f} GFLOP/s in a large matrix product, "
        f"{ceilings['bytes_per_second'] / 1e9:,.1f} GB/s from memory; {report['rounds']} rounds{sizes}"
    )


def table_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["speed"] is None:
        return row["task"], row["runner"], row["note"], "", "", "", ""
    digits = 2 if row["unit"] == "s" else 0 if row["speed"] >= 100 else 1
    return (
        row["task"],
        row["runner"],
        f"{row['speed']:,.{digits}f}",
        row["unit"],
        "" if row["ratio"] is None else f"{row['ratio']:.2f} ×",
        "" if row["fraction"] is None else f"{100 * row['fraction']:.0f} %",
        row["ceiling"] or "",
    )


def format_markdown(report: dict[str, Any], heading: str) -> str:
    """Return the report as a page of Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(table_cells(row) for row in report["rows"])]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"# Speed\n\n{heading}\n\n{describe(report)}\n\n{table}\n"
