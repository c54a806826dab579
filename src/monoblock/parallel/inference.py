"""A model that is larger than one device: several processes share every matrix of it to generate and evaluate.

    # torchrun --nproc-per-node 2 script.py
    world = mb.join_processes()
    pipe = mb.load(folder, world=world)         # each process reads its part of the weights
    text = pipe.generate("In the beginning")    # every process must call it, with the same arguments
    if world.is_main:
        print(text)
    world.shut_down()

All processes compute the same logits bit for bit, because each computes those of some tokens, and all gather them. They
also draw the same random numbers, so all of them choose the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from monoblock.parallel.tensor_parallel import first_row, split_model
from monoblock.parallel.world import DEFAULT_TIMEOUT, World, init_distributed


def join_processes(device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> World:
    """Join the processes that torchrun has started, which share every matrix; without torchrun there is only this one.

    All processes then draw the same random numbers from torch.

    device: "cpu", "cuda", or "auto", which takes GPUs if there are any; each process takes the next one.
    timeout: seconds after which a process that waits for another one fails.
    """
    world = init_distributed(os.environ, device, lambda size, local_size: size, timeout)
    if world.size > 1:
        torch.manual_seed(world.broadcast(int(torch.randint(2**62, ()))))
    return world


def broadcast_text(text: str, world: World) -> str:
    """Return, in every process, the text of the main process."""
    if world.size == 1:
        return text
    data = text.encode()
    buffer = torch.zeros(world.broadcast(len(data)), dtype=torch.uint8)
    if world.is_main and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return bytes(buffer.tolist()).decode()


class TensorParts:
    """Split a model on the meta device, and select the part of each weight that this process stores."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh, self.notes = mesh, split_model(model, mesh)
        self._split = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}

    def select(self, names: Sequence[str], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of each of these weights that this process stores; it is a view."""
        return [self._select(name, weight) for name, weight in zip(names, weights, strict=True)]

    def _select(self, name: str, weight: Tensor) -> Tensor:
        if name not in self._split:
            return weight
        (placement,) = self._split[name].placements
        assert isinstance(placement, Shard)
        dim = placement.dim
        return weight.narrow(dim, first_row(weight.shape[dim], self.mesh), self._split[name].to_local().shape[dim])

    def join(self, name: str, part: Tensor) -> Tensor:
        """Return a part as what the model stores under this name: a DTensor if the weight is split."""
        if name not in self._split:
            return part
        split = self._split[name]
        shape, stride = split.shape, split.stride()
        return DTensor.from_local(part, self.mesh, split.placements, run_check=False, shape=shape, stride=stride)
