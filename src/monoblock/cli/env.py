"""`monoblock env`: what this machine has, what would be chosen on it, and why."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import click

from monoblock import __version__
from monoblock.cli.common import as_json, human_bytes, next_verb, print_json, table

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "click", "rich", "tomli-w", "jinja2")
OPTIONAL = ("transformers", "sentencepiece", "gguf", "sacrebleu", "matplotlib", "torchao", "tensorboard")
COMPILERS = ("c++", "g++", "clang++")  # torch.compile on CPU calls one of them


class Choice(NamedTuple):
    value: str
    why: str


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"monoblock": __version__, "python": platform.python_version()}
    return found | {name: _version(name) for name in (*NEEDED, *OPTIONAL)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": usable_memory(),
        "compiler": next((found for name in COMPILERS if (found := shutil.which(name))), None),
        "devices": devices(),
    }


def usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int | None:
    """Physical memory, or the container's limit where that is less; None where the system does not say."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def devices() -> list[dict[str, Any]]:
    """The accelerators torch can use, best first, and the CPU last."""
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "name": card.name, "memory_bytes": card.total_memory})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "memory_bytes": None})
    return [*found, {"device": "cpu", "name": platform.processor() or platform.machine(), "memory_bytes": None}]


def choose_device() -> Choice:
    import torch

    if torch.cuda.is_available():
        return Choice("cuda", f"a CUDA device is there: {torch.cuda.get_device_name()}")
    if torch.backends.mps.is_available():
        return Choice("mps", "no CUDA device, but an Apple GPU")
    if torch.version.cuda is None:
        return Choice("cpu", "this build of torch has no CUDA")
    return Choice("cpu", "torch was built with CUDA, but sees no device")


def choose_dtype(device: str) -> Choice:
    import torch

    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Choice("bfloat16", "this GPU computes in it: half the memory, and no loss scaling as float16 needs")
    if device == "cuda":
        return Choice("float32", "this GPU has no bfloat16, and float16 would need loss scaling")
    return Choice("float32", f"on {device} lower precision is seldom faster, and float32 is exact to the references")


def gather() -> dict[str, Any]:
    device = choose_device()
    chosen = {"device": device, "dtype": choose_dtype(device.value)}
    return {
        "versions": versions(),
        "machine": machine(),
        "chosen": {what: choice._asdict() for what, choice in chosen.items()},
    }


@click.command(name="env", help="Versions, devices, what would be chosen on this machine and why.")
@as_json
def command(as_json: bool) -> None:
    found = gather()
    if as_json:
        print_json(found)
        return
    table(("package", "version"), [(name, number or "not installed") for name, number in found["versions"].items()])
    click.echo()
    table(("machine", ""), list(_machine_rows(found["machine"]).items()))
    click.echo()
    table(("chosen", "", "because"), [(what, *choice.values()) for what, choice in found["chosen"].items()])
    next_verb("demo")


def _machine_rows(found: dict[str, Any]) -> dict[str, str]:
    rows = {
        "system": found["system"],
        "cores": str(found["cores"]),
        "threads": f"{found['threads']} (torch, inside one operation)",
        "memory": _memory(found["memory_bytes"]),
        "compiler": found["compiler"] or "none (torch.compile cannot run on the CPU)",
    }
    for card in found["devices"]:
        memory = f", {_memory(card['memory_bytes'])}" if card["memory_bytes"] else ""
        rows[card["device"]] = card["name"] + memory
    return rows


def _memory(number: int | None) -> str:
    return human_bytes(number) if number else "unknown"
