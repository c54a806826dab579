"""Read weights in a chosen dtype with little more memory than the weights themselves.

A tensor that needs no conversion stays a view of the memory-mapped file.  A tensor that is converted is read through a
second mapping of the file.  This mapping is reopened from time to time, because its pages that have been read count as
memory in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from monoblock.errors import FileError
from monoblock.interop.safetensors_reader import SafetensorsWeights
from monoblock.untrusted_files import short_repr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


REMAP_BYTES = 2**22  # least number of bytes read through a mapping before it is reopened
REMAPS_PER_MODEL = 32  # about how often a large file is mapped again
TensorFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _reopen(weights: SafetensorsWeights) -> SafetensorsWeights:
    """Return the same weights with files that are mapped again on access; the headers are not read again."""
    reopened = copy.copy(weights)
    reopened._open_files = {}
    return reopened


def without_rest(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps no memory in use but its own."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class WeightReader:
    """Read stored tensors, transform them and convert them to one dtype on one device."""

    def __init__(self, weights: SafetensorsWeights, dtype: torch.dtype, device: str = "cpu") -> None:
        self.weights, self.dtype, self.device = weights, dtype, torch.device(device)
        self.temporary_weights, self.bytes_read = _reopen(weights), 0
        self.remap_bytes = max(REMAP_BYTES, weights.nbytes // REMAPS_PER_MODEL)

    def load(self, keys: Sequence[str], transform: TensorFunction = identity) -> Sequence[Tensor]:
        """Apply `transform` to the tensors with these names; return its results in `self.dtype` on `self.device`."""
        for key in keys:
            dtype = self.weights.entries[key].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise FileError(f"{short_repr(key)} has dtype {dtype}, but weights must be floating-point")
        tensors = self._read_tensors(self.temporary_weights, keys, transform)
        if len(keys) == 1 and all(self._can_be_view(tensor) for tensor in tensors):
            return self._read_tensors(self.weights, keys, transform)
        if len(keys) > 1:  # the transform has copied the tensors to new memory
            converted = [without_rest(t).to(self.device, self.dtype).contiguous() for t in tensors]
            self._count_bytes(sum(tensor.nbytes for tensor in tensors))
            return converted
        shapes = [tensor.shape for tensor in tensors]
        del tensors
        return [self._load_by_rows(keys, transform, index, shape) for index, shape in enumerate(shapes)]

    def _load_by_rows(self, keys: Sequence[str], transform: TensorFunction, index: int, shape: torch.Size) -> Tensor:
        """Return result number `index` of the transform, which has this shape, converted a block of rows at a time."""
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        size = self.weights.entries[keys[0]].dtype.itemsize * shape.numel()
        rows = max(1, self.remap_bytes * shape[0] // size) if shape.numel() else 1
        for start in range(0, shape[0], rows):
            block = self._read_tensors(self.temporary_weights, keys, transform)[index][start : start + rows]
            result[start : start + rows].copy_(block)
            self._count_bytes(block.nbytes)
        return result

    def _count_bytes(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self.bytes_read > self.remap_bytes:
            self.temporary_weights, self.bytes_read = _reopen(self.weights), 0

    def _can_be_view(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.dtype and self.device.type == "cpu" and tensor.is_contiguous()

    @staticmethod
    def _read_tensors(weights: SafetensorsWeights, keys: Sequence[str], transform: TensorFunction) -> Sequence[Tensor]:
        tensors = [weights[key] for key in keys]
        try:
            return transform(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:100]
            raise FileError(
                f"{short_repr(keys[0])} of shape {weights.shapes[keys[0]]} does not fit the configuration: {reason}"
            ) from None


# -- the parts of weights that a process reads -------------------------------------------------------------------------


class WeightParts(Protocol):
    def select(self, names: Sequence[str], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return views of the parts of these weights that this process stores."""
        ...

    def join(self, name: str, part: Tensor) -> Tensor:
        """Return a part, in its final dtype and on its device, as what the model stores under this name."""
        ...


class WholeWeights:
    def select(self, names: Sequence[str], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights

    def join(self, name: str, part: Tensor) -> Tensor:
        return part


def split_weights(model: nn.Module, mesh: DeviceMesh | None) -> WeightParts:
    """Split a model on the meta device among the processes of a mesh, before its weights are read."""
    if mesh is None:
        return WholeWeights()
    from monoblock.parallel.inference import TensorParts  # torch.distributed.tensor takes long to import

    return TensorParts(model, mesh)
