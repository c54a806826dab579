"""Which part of each weight a process reads: all of it, or what it stores if several processes share the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
