"""`monoblock env`: installed versions, devices, and the defaults chosen on this machine."""

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from monoblock import __version__
from monoblock.cli.model_options import choose_device, choose_dtype
from monoblock.cli.output import echo, format_bytes, print_table, report
from monoblock.cli.verb import json_option

REQUIRED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "click", "rich", "tomli-w", "jinja2", "jaxtyping")
OPTIONAL_PACKAGES = ("transformers", "sentencepiece", "gguf", "sacrebleu", "matplotlib", "torchao", "tensorboard")
COMPILERS = ("c++", "g++", "clang++")  # torch.compile needs one of them on a CPU


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"monoblock": __version__, "python": platform.python_version()}
    return versions | {name: _package_version(name) for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)}


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine_info() -> dict[str, Any]:
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": usable_memory(),
        "compiler": next((path for name in COMPILERS if (path := shutil.which(name))), None),
        "devices": list_devices(),
    }


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


def collect_environment() -> dict[str, Any]:
    device = choose_device()
    defaults = {"device": device, "dtype": choose_dtype(device.value)}
    return {
        "versions": package_versions(),
        "machine": machine_info(),
        "chosen": {name: choice._asdict() for name, choice in defaults.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Env:
    """Show installed versions, devices, and the default device and dtype, with reasons."""

    as_json: bool = json_option()

    def run(self) -> None:
        report(self.as_json, collect_environment(), _print_environment, "demo")


def _print_environment(environment: dict[str, Any]) -> None:
    versions = [(name, installed or "not installed") for name, installed in environment["versions"].items()]
    print_table(("package", "version"), versions)
    echo()
    print_table(("machine", ""), list(_machine_rows(environment["machine"]).items()))
    echo()
    defaults = [(name, *choice.values()) for name, choice in environment["chosen"].items()]
    print_table(("default", "", "because"), defaults)


def _machine_rows(info: dict[str, Any]) -> dict[str, str]:
    rows = {
        "system": info["system"],
        "cores": str(info["cores"]),
        "threads": f"{info['threads']} (torch.get_num_threads)",
        "memory": _format_memory(info["memory_bytes"]),
        "compiler": info["compiler"] or "none (torch.compile does not work on the CPU)",
    }
    for device in info["devices"]:
        memory = f", {_format_memory(device['memory_bytes'])}" if device["memory_bytes"] else ""
        rows[device["device"]] = device["name"] + memory
    return rows


def _format_memory(size: int | None) -> str:
    return format_bytes(size) if size else "unknown"
