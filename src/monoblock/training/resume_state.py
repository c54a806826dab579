"""Collect and restore the state from which a run resumes: weights, optimizer, random generators and environment."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monoblock.errors import FileError
from monoblock.kernels.cpu import library
from monoblock.nn.kv_cache.lstm_state import CarriedState
from monoblock.training import checkpoint, sharded_checkpoint
from monoblock.training.optimizer import Optimizers
from monoblock.training.sharded_checkpoint import StoredTensor
from monoblock.training.updates.update_guard import STATE_FIELDS

OLD_IDENTITY_KEY = "training recipe"  # only identities of version 0.1 have it
# Keys that identities of earlier versions lack; a run that was begun by one is resumed with their former defaults.
LATER_KEYS = ("data.split", "data.padding", "tokenizer.dropout", "tokenizer.alpha")


def model_tensors(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Tensor]:
    tensors = model.state_dict()
    if not trainable_only:
        return dict(tensors)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name in trainable}


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Return the optimizer states as tensors named "<weight>/<state>"."""
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers.optimizers:
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"{names[weight]}/{key}"] = torch.as_tensor(value)
    return tensors


def empty_optimizer_tensors(
    model: nn.Module, index: Mapping[str, StoredTensor], elsewhere: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return tensors to load the stored optimizer states into, split among processes like their weights.

    elsewhere: the names of weights of which this process has no part.
    """
    weights, tensors = dict(model.named_parameters()), {}
    for full_name, stored in index.items():
        group, name = full_name.split("/", 1)
        weight_name = name.rsplit("/", 1)[0]
        weight = weights.get(weight_name) if group == "optimizer" else None
        if weight is not None and tuple(weight.shape) == stored.shape:
            tensors[name] = torch.empty_like(weight.detach(), dtype=stored.dtype)
        elif group == "optimizer" and weight_name not in elsewhere:
            tensors[name] = torch.empty(stored.shape, dtype=stored.dtype)
    return tensors


def restore_optimizer(model: nn.Module, optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    """Restore the optimizer states that `optimizer_tensors` returned."""
    owners = {
        weight: optimizer
        for optimizer in optimizers.optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    weights = dict(model.named_parameters())
    for optimizer in optimizers.optimizers:
        optimizer.state.clear()  # a weight without a saved state must not keep an old one
    for name, tensor in tensors.items():
        weight_name, key = name.rsplit("/", 1)
        if weight_name not in weights or weights[weight_name] not in owners:
            raise FileError(
                f"the checkpoint has an optimizer state for {weight_name!r}, a weight that this model does not train"
            )
        weight = weights[weight_name]
        device = weight.device if key != "step" or weight.is_cuda else torch.device("cpu")
        owners[weight].state[weight][key] = tensor.clone().to(device)


def carried_tensors(loss: object) -> dict[str, dict[str, Tensor]]:
    """Return the states that an LSTM keeps between batches, as a group of tensors; {} if there are none."""
    carried = getattr(loss, "carried", None)
    return {"carried": carried.tensors} if isinstance(carried, CarriedState) and carried.tensors else {}


def restore_carried(loss: object, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the states that `carried_tensors` returned."""
    carried = getattr(loss, "carried", None)
    if isinstance(carried, CarriedState):
        carried.tensors = {name: tensor.clone() for name, tensor in tensors.get("carried", {}).items()}


@dataclass(frozen=True)
class ResumeTarget:
    """What a checkpoint is loaded into: a model, its optimizers, and a moving average if there is one."""

    model: nn.Module
    optimizers: Optimizers
    average: Mapping[str, Tensor]
    trainable_only: bool = False  # the checkpoint has no frozen weights
    elsewhere: Collection[str] = ()  # names of weights of which this process has no part

    def load_whole(self, path: Path) -> checkpoint.Checkpoint:
        """Load a checkpoint into whole weights; return it."""
        state = sharded_checkpoint.load(path)
        self.model.load_state_dict(dict(state.tensors["model"]), strict=not self.trainable_only)
        restore_optimizer(self.model, self.optimizers, state.tensors["optimizer"])
        for name, tensor in self.average.items():
            tensor.copy_(state.tensors["average"][name])
        return state

    def load_parts(self, path: Path) -> checkpoint.Checkpoint:
        """Load the part of each tensor that this process stores; return the rest of the checkpoint."""
        index = sharded_checkpoint.read_index(path)
        model = model_tensors(self.model, trainable_only=self.trainable_only)
        optimizer = empty_optimizer_tensors(self.model, index, self.elsewhere)
        sharded_checkpoint.load_into(path, index, {"model": model, "optimizer": optimizer, "average": self.average})
        restore_optimizer(self.model, self.optimizers, optimizer)
        return sharded_checkpoint.load_rest(path)


def seed_generators(seed: int) -> None:
    """Seed all random generators that a checkpoint stores, so that the checkpoints of two equal runs are equal."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of all random generators: Python, NumPy, torch and each CUDA device."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    tensors = {
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64).copy()),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def rng_name(part: int) -> str:
    """Return the name under which a checkpoint stores the random states of this number: see `World.random_part`."""
    return f"random-{part}" if part else "random"


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Restore the states of random generators that `rng_tensors` returned."""
    version, *internal = tensors["python"].tolist()
    gauss = float(tensors["python_gauss"][0])
    random.setstate((version, tuple(internal), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached = tensors["numpy_rest"].tolist()
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(tensors["torch"])
    for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{n}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda{n}"], n)


def restore_process_rng(groups: Mapping[str, Mapping[str, Tensor]], part: int, step: int) -> None:
    """Restore the random states of this number, or seed torch anew if the checkpoint has none."""
    if rng_name(part) in groups:
        restore_rng(groups[rng_name(part)])
    else:
        torch.manual_seed((torch.initial_seed() + step) % 2**63)


def check_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint; raise FileError if a number that training needs is missing or invalid."""
    best, guard = metadata.get("best"), metadata.get("guard")
    if not isinstance(best, dict) or not isinstance(guard, dict):
        raise FileError(f"the {checkpoint.METADATA_FILE} of the checkpoint has no best evaluation or no guard")
    counts = {"tokens": metadata.get("tokens"), "parts": metadata.get("parts")}
    counts |= {f"guard.{name}": guard.get(name) for name in STATE_FIELDS if name != "mean"}
    optional = {"sound": metadata.get("sound"), "best.step": best.get("step")}
    counts |= {name: value for name, value in optional.items() if value is not None}
    loss = 0.0 if best.get("loss") is None else best["loss"]
    wrong = [name for name, value in counts.items() if type(value) is not int or value < 0]
    wrong += [name for name, value in (("guard.mean", guard.get("mean")), ("best.loss", loss)) if not is_number(value)]
    wrong += ["parts"] if counts["parts"] == 0 else []
    if wrong:
        raise FileError(f"the {checkpoint.METADATA_FILE} of the checkpoint has no valid number for {wrong[0]}")
    return metadata


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def last_good_step(folder: Path) -> int | None:
    """Return the step of the newest intact checkpoint whose last update was not rejected; None if there is none."""
    for step in reversed(checkpoint.list_steps(folder)):
        path = folder / f"step-{step}"
        if checkpoint.find_problem(path) is None and not checkpoint.load_metadata(path)["guard"]["bad_in_a_row"]:
            return step
    return None


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise FileError, naming the first difference, unless a resumed run has the identity it was started with.

    saved: the identity in the checkpoint.
    current, old: the identity of the resumed run, as this version and as version 0.1 writes it.
    """
    if OLD_IDENTITY_KEY in saved:
        current = old
    current = {key: value for key, value in current.items() if key in saved or key not in LATER_KEYS}
    for key in {**saved, **current}:
        if saved.get(key) != current.get(key):
            values = f" ({saved.get(key)!r}, and now {current.get(key)!r})" if "." in key and " " not in key else ""
            raise FileError(
                f"this run was started with another {key}{values}; restore the original, or start a new run with --out"
            )


def environment(device: torch.device, compiled: bool, processes: int = 1) -> dict[str, Any]:
    """Return the versions and hardware that must be the same for a run to resume bit for bit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "kernels": library.kernels_id() if device.type == "cpu" else "",
        "compiled": compiled,
        "processes": processes,
    }


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe each value that differs, as in "threads was 2 and is 4"."""
    return [f"{key} was {saved.get(key)} and is {current[key]}" for key in current if saved.get(key) != current[key]]
