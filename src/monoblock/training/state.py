"""Everything a training step depends on besides data, as tensors and facts: optimizer states and random generators."""

from __future__ import annotations

import platform
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monoblock.errors import FileError
from monoblock.native import library
from monoblock.training.optimizer import Optimizers


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Optimizer states by "<weight>/<state>"; whole numbers become tensors too."""
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers.each:
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"{names[weight]}/{key}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(model: nn.Module, optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    owners = {
        weight: optimizer for optimizer in optimizers.each for g in optimizer.param_groups for weight in g["params"]
    }
    weights = dict(model.named_parameters())
    for optimizer in optimizers.each:
        optimizer.state.clear()  # a weight without a state then has none now
    for name, tensor in tensors.items():
        weight_name, key = name.rsplit("/", 1)
        if weight_name not in weights or weights[weight_name] not in owners:
            raise FileError(f"the checkpoint's optimizer knows a weight {weight_name!r} that this model does not have")
        weight = weights[weight_name]
        device = weight.device if key != "step" or weight.is_cuda else torch.device("cpu")
        owners[weight].state[weight][key] = tensor.clone().to(device)


def random_tensors() -> dict[str, Tensor]:
    """The states of all generators: Python, NumPy, torch, and each CUDA device."""
    version, internal, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    tensors = {
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64).copy()),
        "numpy_rest": torch.tensor([place, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def random_of(rank: int) -> str:
    """The name of a process's random states in a checkpoint."""
    return f"random-{rank}" if rank else "random"


def restore_random(tensors: Mapping[str, Tensor]) -> None:
    version, *internal = tensors["python"].tolist()
    gauss = float(tensors["python_gauss"][0])
    random.setstate((version, tuple(internal), None if gauss != gauss else gauss))
    place, has_gauss, cached = tensors["numpy_rest"].tolist()
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), int(place), int(has_gauss), cached))
    torch.set_rng_state(tensors["torch"])
    for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{n}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda{n}"], n)


def check_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FileError unless a run goes on with what it began with."""
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            raise FileError(
                f"this run was started with another {key}; put it back as it was, or start a new run with --out"
            )


def circumstances(device: torch.device, compiled: bool, processes: int = 1) -> dict[str, Any]:
    """What bit-equal resumption hangs on besides the checkpoint."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "kernels": library.name() if device.type == "cpu" else "",
        "compiled": compiled,
        "processes": processes,
    }


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, what is not as it was."""
    return [f"{key} was {then.get(key)} and is {now[key]}" for key in now if then.get(key) != now[key]]
