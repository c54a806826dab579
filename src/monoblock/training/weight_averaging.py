"""Average weights: the exponential moving average during training, or the mean of several checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from monoblock.errors import FileError
from monoblock.parallel.strategy import mesh_of
from monoblock.training import checkpoint


class ExponentialMovingAverage:
    """The exponential moving average of the trainable weights of a model.

    After every update, average = decay * average + (1 - decay) * weight. The decay is smaller in the first updates.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: weight.detach().clone() for name, weight in _trainable_parameters(model)}
        self.tensors["updates"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.tensors["updates"] += 1
        count = int(self.tensors["updates"])
        decay = min(self.decay, (1 + count) / (10 + count))
        weights = dict(_trainable_parameters(model))
        for mesh in dict.fromkeys(map(mesh_of, weights.values())):
            names = [name for name, weight in weights.items() if mesh_of(weight) == mesh]
            torch._foreach_lerp_([self.tensors[name] for name in names], [weights[name] for name in names], 1 - decay)

    @torch.no_grad()
    def update_if(self, is_good: Tensor, model: nn.Module) -> None:
        """Do the same as `update` if `is_good`, a bool on the device of the weights, is true; a GPU does not wait."""
        count = self.tensors["updates"] = self.tensors["updates"].to(is_good.device) + is_good
        share = 1 - ((1 + count.double()) / (10 + count.double())).clamp(max=self.decay)
        share = torch.where(is_good, share, 0)
        weights = dict(_trainable_parameters(model))
        by_dtype = {dtype: share.to(dtype) for dtype in {weight.dtype for weight in weights.values()}}
        shares = [by_dtype[weight.dtype] for weight in weights.values()]
        torch._foreach_lerp_([self.tensors[name] for name in weights], list(weights.values()), shares)

    @contextmanager
    def average_parameters(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights in the `with` block, and its own weights again afterwards."""
        original = {name: weight.detach().clone() for name, weight in _trainable_parameters(model)}
        self._copy_to_model(self.tensors, model)
        try:
            yield
        finally:
            self._copy_to_model(original, model)

    @staticmethod
    @torch.no_grad()
    def _copy_to_model(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
        for name, weight in _trainable_parameters(model):
            weight.copy_(tensors[name])


def _trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for the parameters to average; frozen parameters never change."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def average_checkpoints(
    checkpoints: Sequence[Path],
    read: Callable[[Path], Mapping[str, Tensor]] = lambda path: checkpoint.load(path).tensors["model"],
) -> dict[str, Tensor]:
    """Return the mean of the model weights in several checkpoints, computed in fp64.

    read: a function that returns the weights in a checkpoint, or the part of each that this process stores.
    """
    if read is None:
        read = lambda path: checkpoint.load(path).tensors["model"]
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in checkpoints:
        problem = checkpoint.find_problem(path)
        if problem is not None:
            raise FileError(f"{problem}; the checkpoints cannot be averaged")
        for name, tensor in read(path).items():
            dtypes[name] = tensor.dtype
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return {name: (total / len(checkpoints)).to(dtypes[name]) for name, total in sums.items()}
