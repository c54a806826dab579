"""The verbs of this machine: `bench` measures speed and memory, `env` shows versions, devices and defaults."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock import __version__
from monoblock.cli.model_options import device_option, dtype_option
from monoblock.cli.output import echo, format_bytes, print_table, report
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError, FileError, did_you_mean, with_article

if TYPE_CHECKING:
    from monoblock.config.model import ModelConfig
    from monoblock.model import Transformer

DEFAULT_MODEL = "gpt2"
DEFAULT_PROMPT, DEFAULT_NEW = 32, 64  # tokens
COLUMNS = ("runner", "prefill tok/s", "decode tok/s", "ms per token", "weights", "peak memory")
REQUIRED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "click", "rich", "tomli-w", "jinja2", "jaxtyping")
OPTIONAL_PACKAGES = ("transformers", "sentencepiece", "gguf", "sacrebleu", "matplotlib", "torchao", "tensorboard")
COMPILERS = ("c++", "g++", "clang++")  # torch.compile needs one of them on a CPU


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the tokens per second and the memory of WHAT: a model folder, or a preset, which gets random weights
    (default: gpt2). Other installed libraries that can run the same weights are measured for comparison. --all measures
    training, prefill, decoding, translation and start-up with fixed shapes, beside the most that the hardware can do.
    """

    what: str | None = argument(None)
    all: bool = option("Measure all tasks in one table, instead of one model.", False)
    small: bool = option("toy sizes, to see in seconds that everything runs.", False, needs=("all",))
    out: Path | None = option("write the table to this file (Markdown).", path="file", needs=("all",))
    prompt: int | None = option("Tokens in the prompt.  [default: 32, less if the context is short]", least=1)
    new: int | None = option("Tokens to generate.  [default: 64, less if the context is short]", least=1)
    batch: int | None = option("Sequences in a batch.  [default: 1]", least=1)
    rounds: int = option("Repetitions; the median is reported.", 3, least=1)
    only: tuple[str, ...] = option(
        "Measure only this runner, such as transformers or 'monoblock, 8 bits'; may be repeated.", ()
    )
    no_peers: bool = option("Measure monoblock alone, without other libraries.", False)
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    as_json: bool = json_option()

    def run(self) -> None:
        if self.all:
            self._measure_all()
            return
        from monoblock.bench.generation import measure_runners

        names = _select_runners(self.only, self.no_peers)
        what, batch = self.what or DEFAULT_MODEL, self.batch or 1
        model, prompt, new = _load_model(what, self.device, self.dtype, self.prompt, self.new)
        with tempfile.TemporaryDirectory(prefix="monoblock-bench-") as folder:
            result = {"model": what} | measure_runners(
                model, Path(folder), names, prompt, new, batch, self.rounds, progress=partial(echo, err=True)
            )
        next_command = f"account {shlex.quote(what)} --batch {batch} --length {prompt + new}"
        report(self.as_json, result, print_report, next_command)

    def _measure_all(self) -> None:
        """Measure all tasks, print the table, and write it to the file."""
        sizes = {"WHAT": self.what, "--prompt": self.prompt, "--new": self.new, "--batch": self.batch}
        for name, value in {**sizes, "--only": self.only}.items():
            if value:
                raise ConfigError(f"--all measures fixed shapes, so {name} has no effect; leave out one of the two")
        if self.out is not None:
            _check_writable(self.out)
        from monoblock.bench.suite import COLUMNS, Options, describe, format_markdown, measure_all, table_cells
        from monoblock.runs.device import resolve_device

        device, torch_dtype = resolve_device(self.device, self.dtype)
        result = measure_all(
            Options(device, torch_dtype, self.rounds, self.small, not self.no_peers, partial(echo, err=True))
        )
        result["source"] = _describe_run()
        if self.out is not None:
            self.out.write_text(format_markdown(result, result["source"]), encoding="utf-8")

        def print_rows(result: dict[str, Any]) -> None:
            echo(describe(result))
            print_table(COLUMNS, [table_cells(row) for row in result["rows"]])

        report(self.as_json, result, print_rows, "bench gpt2 --batch 8")


def _check_writable(out: Path) -> None:
    """Raise FileError, before minutes of measuring, if a file cannot be written."""
    if not out.parent.is_dir():
        raise FileError(f"there is no folder {out.parent} for --out {out}; make it, or give another file")
    is_new = not out.exists()
    try:
        out.open("a").close()
    except OSError as problem:
        raise FileError(f"--out {out} cannot be written: {problem.strerror or problem}") from None
    if is_new:
        out.unlink()


def _describe_run() -> str:
    """Return the command, the date, the version and, in a checkout, the commit, for a file of results."""
    from datetime import date

    commit = _commit()
    version = f"monoblock {__version__}" if commit is None else f"monoblock {__version__}, commit {commit}"
    return f"`monoblock {shlex.join(sys.argv[1:])}`, {date.today()}, {version}"


def _commit() -> str | None:
    """Return the commit of the checkout that this file belongs to, or None if git does not track it."""
    import subprocess

    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        command = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _select_runners(only: tuple[str, ...], only_monoblock: bool) -> list[str]:
    from monoblock.bench.generation import DEFAULT_RUNNERS, RUNNERS

    for name in only:
        if name not in RUNNERS:
            raise ConfigError(f"there is no runner {name!r}; write one of {list(RUNNERS)}{did_you_mean(name, RUNNERS)}")
    names = list(only) or DEFAULT_RUNNERS
    others = [name for name in names if not name.startswith("monoblock")]
    if only and only_monoblock and others:
        raise ConfigError(f"--only {others[0]!r} is another library, but --no-peers leaves them out")
    return [name for name in names if name not in others] if only_monoblock else names


def _load_model(
    what: str, device: str | None, dtype: str | None, prompt: int | None, new: int | None
) -> tuple[Transformer, int, int]:
    """Load a model folder, or build a preset with random weights; return it, and the lengths of prompt and new text."""
    import torch

    from monoblock.config.presets import PRESETS, preset
    from monoblock.model import Transformer
    from monoblock.runs.device import resolve_device

    device, torch_dtype = resolve_device(device, dtype)
    if Path(what).exists():
        model = Transformer.from_pretrained(what, device=device, dtype=torch_dtype)
        lengths = _choose_lengths(model.config, prompt, new)
    elif what in PRESETS:
        lengths = _choose_lengths(preset(what), prompt, new)
        echo(f"building {what} with random weights", err=True)
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


def print_report(report: dict[str, Any]) -> None:
    sequences = f"{report['batch']} sequences" if report["batch"] > 1 else "one sequence"
    echo(
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['threads']} threads, "
        f"torch {report['torch']}: {sequences}, {report['prompt']} prompt tokens and {report['new']} new tokens, "
        f"key/value cache {format_bytes(report['kv_cache_bytes'])}"
    )
    rows = []
    for name, row in report["runners"].items():
        rate = row["decode_tokens_per_second"]
        speeds = (None, None) if rate is None else (round(rate, 1), round(1000 * report["batch"] / rate, 2))
        peak = "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
        prefill = round(row["prefill_tokens_per_second"], 1)
        rows.append((name, prefill, *speeds, format_bytes(row["weight_bytes"]), peak))
    print_table(COLUMNS, rows)
    for name, reason in report["absent"].items():
        echo(f"{name}: {reason}", err=True)


# -- env ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Env:
    """Show installed versions, devices, and the default device and dtype, with reasons."""

    as_json: bool = json_option()

    def run(self) -> None:
        import torch

        from monoblock.runs.device import choose_device, choose_dtype

        device = choose_device()
        environment = {
            "versions": {"monoblock": __version__, "python": platform.python_version()}
            | {name: package_version(name) for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)},
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "cores": usable_cores(),
                "threads": torch.get_num_threads(),
                "memory_bytes": usable_memory(),
                "compiler": next((path for name in COMPILERS if (path := shutil.which(name))), None),
                "devices": list_devices(),
            },
            "chosen": {"device": device._asdict(), "dtype": choose_dtype(device.value)._asdict()},
        }
        report(self.as_json, environment, _print_environment, "demo")


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Return the number of cores this process may use; in a container, that can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int | None:
    """Return the physical memory in bytes, or the memory limit of the container if that is lower; None if unknown."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def list_devices() -> list[dict[str, Any]]:
    """Return the devices torch can use, GPUs first."""
    import torch

    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU", "memory_bytes": None})
    return [*devices, {"device": "cpu", "name": platform.processor() or platform.machine(), "memory_bytes": None}]


def _print_environment(environment: dict[str, Any]) -> None:
    versions = [(name, installed or "not installed") for name, installed in environment["versions"].items()]
    print_table(("package", "version"), versions)
    echo()
    machine = environment["machine"]
    memory = machine["memory_bytes"]
    rows = [
        ("system", machine["system"]),
        ("cores", str(machine["cores"])),
        ("threads", f"{machine['threads']} (torch.get_num_threads)"),
        ("memory", format_bytes(memory) if memory else "unknown"),
        ("compiler", machine["compiler"] or "none (torch.compile does not work on the CPU)"),
    ]
    for device in machine["devices"]:
        memory = f", {format_bytes(device['memory_bytes'])}" if device["memory_bytes"] else ""
        rows.append((device["device"], device["name"] + memory))
    print_table(("machine", ""), rows)
    echo()
    print_table(
        ("default", "", "because"), [(name, *choice.values()) for name, choice in environment["chosen"].items()]
    )
