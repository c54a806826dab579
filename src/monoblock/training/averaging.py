"""Averages of weights: exponential while training (EMA), plain over the last checkpoints afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from monoblock.errors import FileError
from monoblock.training.checkpoint import problem_with


class Average:
    """weight = decay * weight + (1 - decay) * the model's, after every update; young averages trust the model more."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: weight.detach().clone() for name, weight in _trained(model)}
        self.tensors["updates"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.tensors["updates"] += 1
        count = int(self.tensors["updates"])
        share = 1 - min(self.decay, (1 + count) / (10 + count))
        weights = dict(_trained(model))
        torch._foreach_lerp_([self.tensors[name] for name in weights], list(weights.values()), share)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the average's weights, and its own again afterwards."""
        own = {name: weight.detach().clone() for name, weight in _trained(model)}
        self._copy(self.tensors, model)
        try:
            yield
        finally:
            self._copy(own, model)

    @staticmethod
    @torch.no_grad()
    def _copy(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
        for name, weight in _trained(model):
            weight.copy_(tensors[name])


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What changes: frozen weights are their own average."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def mean_of(places: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the models in several checkpoints, added up in fp64."""
    sums: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for place in places:
        problem = problem_with(place)
        if problem is not None:
            raise FileError(f"{problem}; the checkpoints cannot be averaged")
        for name, tensor in load_file(place / "model.safetensors").items():
            kinds[name] = tensor.dtype
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return {name: (total / len(places)).to(kinds[name]) for name, total in sums.items()}
