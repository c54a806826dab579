"""Collect and restore the state from which a run resumes: weights, optimizer, random generators and environment."""

from __future__ import annotations

import math
import platform
import random
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from monoblock.errors import FileError, shorten_message
from monoblock.kernels.cpu import library
from monoblock.parallel.strategy import mesh_of
from monoblock.training import checkpoint
from monoblock.training.checkpoint import ADVICE
from monoblock.training.optimizer import Optimizers

GUARD_FIELDS = ("mean", "good", "bad_in_a_row", "good_in_a_row", "rollbacks")  # of the update guard
MAX_COUNT = 2**63
MT19937_WORDS = 624  # of the state of the generators of Python and NumPy
RNG_NAME = re.compile(r"random(-\d{1,6})?", re.ASCII)
Spec = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a tensor


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


def _expected_optimizer(model: nn.Module, optimizers: Optimizers, index: Collection[str]) -> dict[str, Spec]:
    """Return the optimizer states of each weight for which a checkpoint stores any, by their names in the index.

    The shapes and dtypes of the states that an optimizer keeps for a weight are found by a step on a copy.
    """
    names = {weight: name for name, weight in model.named_parameters()}
    stored = {name.split("/", 1)[1].rsplit("/", 1)[0] for name in index if name.startswith("optimizer/")}
    expected: dict[str, Spec] = {}
    found: dict[Any, dict[str, Spec]] = {}  # weights of the same shape in a group have the same states
    for optimizer in optimizers.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for weight in (weight for weight in group["params"] if names.get(weight) in stored):
                split = (mesh_of(weight), getattr(weight, "placements", None))
                kind = (optimizer, number, weight.shape, weight.dtype, *split)
                if kind not in found:
                    copied = torch.zeros_like(weight.detach()).requires_grad_()
                    copied.grad = torch.zeros_like(weight.detach())
                    probe, state = object.__new__(type(optimizer)), defaultdict[Tensor, dict[str, Any]](dict)
                    probe.__dict__.update(optimizer.__dict__, state=state, param_groups=[{**group, "params": [copied]}])
                    probe.step()
                    found[kind] = {key: _spec(torch.as_tensor(value)) for key, value in state[copied].items()}
                expected |= {f"optimizer/{names[weight]}/{key}": spec for key, spec in found[kind].items()}
    return expected


def _spec(tensor: Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype


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


class Carried(Protocol):
    """What a loss keeps from batch to batch, as its attribute `carried`: tensors that a checkpoint stores."""

    tensors: dict[str, Tensor]

    def fits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether stored tensors can be those of a training of `model`."""


def load_state(
    path: Path,
    model: nn.Module,
    optimizers: Optimizers,
    average: Mapping[str, Tensor],
    scaler: torch.amp.GradScaler,
    *,
    whole: bool,
    trainable_only: bool = False,
    elsewhere: Collection[str] = (),
    carried: Carried | None = None,
) -> checkpoint.Checkpoint:
    """Load a checkpoint into a model, its optimizers and its average; return what it has besides them.

    A hash shows damage, not intent: all of it is checked before any of it is used, so that no crafted checkpoint can
    make a kernel read or write outside its tensors.

    whole: whether this process stores all tensors whole, and not only its part of each.
    trainable_only: the checkpoint has no frozen weights.
    elsewhere: the names of weights of which this process has no part.
    carried: what the loss keeps from batch to batch.
    """
    index, rest = checkpoint.read_index(path), checkpoint.load_rest(path)
    weights = model_tensors(model, trainable_only=trainable_only)
    expected = {f"model/{name}": _spec(tensor) for name, tensor in weights.items()}
    expected |= {f"average/{name}": _spec(tensor) for name, tensor in average.items()}
    expected |= _expected_optimizer(model, optimizers, index)
    is_other = lambda name: bool(elsewhere) or name.split("/")[0] not in checkpoint.SHARED_GROUPS
    checkpoint.check_tensors(path, index, expected, is_other)
    for name, tensors in rest.tensors.items():
        if name == "carried":
            if carried is None or not carried.fits(model, tensors):
                raise FileError(f"{path} has carried states of another model; {ADVICE}")
        elif RNG_NAME.fullmatch(name):
            check_rng(tensors, path / name)
        else:
            raise FileError(f"{path} has tensors {name!r}, which no run has; {ADVICE}")
    check_metadata(rest.metadata, scaler.state_dict())

    if whole:
        groups = checkpoint.load(path).tensors
        model.load_state_dict(dict(groups["model"]), strict=not trainable_only)
        for name, tensor in average.items():
            tensor.copy_(groups["average"][name])
        states = groups.get("optimizer", {})
    else:
        states, parameters = {}, dict(model.named_parameters())
        for full_name in (name for name in index if name.startswith("optimizer/")):
            name, stored = full_name.removeprefix("optimizer/"), index[full_name]
            owner = name.rsplit("/", 1)[0]
            if owner in parameters and tuple(parameters[owner].shape) == stored.shape:  # split like the weight
                states[name] = torch.empty_like(parameters[owner].detach(), dtype=stored.dtype)
            elif owner not in elsewhere:
                states[name] = torch.empty(stored.shape, dtype=stored.dtype)
        checkpoint.load_into(path, index, {"model": weights, "optimizer": states, "average": average})
    restore_optimizer(model, optimizers, states)
    if carried is not None:
        carried.tensors = {name: tensor.clone() for name, tensor in rest.tensors.get("carried", {}).items()}
    return rest


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


def check_rng(tensors: Mapping[str, Tensor], name: object) -> None:
    """Raise FileError unless stored random states are such that a generator can continue from them.

    NumPy, for one, would read past the end of its state from a position that is too large.
    """
    expected = {key: _spec(state) for key, state in rng_tensors().items() if not key.startswith("cuda")}
    cuda = {key: state for key, state in tensors.items() if re.fullmatch(r"cuda\d{1,3}", key)}
    is_valid = {key: _spec(state) for key, state in tensors.items() if key not in cuda} == expected
    is_valid = is_valid and all(state.dim() == 1 and state.dtype == torch.uint8 for state in cuda.values())
    if is_valid:
        version, *words, python_position = tensors["python"].tolist()
        position, has_gauss, _ = tensors["numpy_rest"].tolist()
        is_valid = version == random.getstate()[0] and has_gauss in (0, 1)
        is_valid = is_valid and all(0 <= word < 2**32 for word in (*words, *tensors["numpy"].tolist()))
        is_valid = is_valid and all(n in range(MT19937_WORDS + 1) for n in (python_position, position))
        try:
            torch.Generator().set_state(tensors["torch"])
        except RuntimeError:
            is_valid = False
    if not is_valid:
        raise FileError(f"{name} has no states that random generators can continue from; {ADVICE}")


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


def check_metadata(metadata: Mapping[str, Any], scaler: Mapping[str, Any]) -> None:
    """Raise FileError if something that training needs is missing in the metadata of a checkpoint, or is invalid.

    scaler: the state of the gradient scaler of this run; {} if there is none.
    """
    tables = {name: metadata.get(name) for name in ("best", "guard", "identity", "environment", "scaler")}
    missing = [name for name, table in tables.items() if not isinstance(table, dict)]
    best, guard, saved_scaler = (tables[name] or {} for name in ("best", "guard", "scaler"))
    if not missing:
        missing += ["last_good"] * ("last_good" not in metadata) + ["best"] * (best.keys() != {"step", "loss"})
        missing += ["scaler"] * (bool(saved_scaler and scaler) and saved_scaler.keys() != scaler.keys())
    if missing:
        raise FileError(f"the {checkpoint.METADATA_FILE} of the checkpoint has no valid {missing[0]!r}; {ADVICE}")
    counts = {"tokens": metadata.get("tokens"), "micro_batches": metadata.get("micro_batches")}
    counts |= {f"guard.{name}": guard.get(name) for name in GUARD_FIELDS if name != "mean"}
    optional = {"last_good": metadata.get("last_good"), "best.step": best.get("step")}
    counts |= {name: value for name, value in optional.items() if value is not None}
    loss = 0.0 if best.get("loss") is None else best["loss"]
    wrong = [name for name, value in counts.items() if not (type(value) is int and 0 <= value < MAX_COUNT)]
    wrong += ["micro_batches"] if counts["micro_batches"] == 0 else []
    wrong += ["best.loss"] if not is_number(loss) else []  # which is not finite if the model diverged
    finite: dict[str, Any] = {"guard.mean": guard.get("mean")} | {
        f"scaler.{name}": value for name, value in saved_scaler.items()
    }
    wrong += [name for name, value in finite.items() if not (is_number(value) and 0 <= value < math.inf)]
    if wrong:
        raise FileError(
            f"the {checkpoint.METADATA_FILE} of the checkpoint has no valid number for {wrong[0]!r}; {ADVICE}"
        )


def is_number(value: object) -> bool:
    """Return whether a value is a float, or an int that a float can stand for."""
    return type(value) is float or (type(value) is int and abs(value) < MAX_COUNT)


def last_good_step(folder: Path) -> int | None:
    """Return the step of the newest intact checkpoint whose last update was not rejected; None if there is none."""
    for step in reversed(checkpoint.list_steps(folder)):
        path = folder / f"step-{step}"
        if checkpoint.find_problem(path) is None and not checkpoint.load_metadata(path)["guard"]["bad_in_a_row"]:
            return step
    return None


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise FileError, naming the first difference, unless a resumed run has the identity it was started with."""
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
    return [
        shorten_message(f"{key} was {saved.get(key)} and is {current[key]}")
        for key in current
        if saved.get(key) != current[key]
    ]
