"""Strategies: how the processes of a run share the weights of the model and every batch.

ddp       each process has all weights; gradients are summed while the backward pass runs (DistributedDataParallel)
fsdp      each process stores a part of every weight, and gathers a block before it runs (fully_shard)
tp        each process stores and computes a part of every matrix (parallel/tensor_parallel.py)
fsdp+tp   groups of processes compute as with tp, and the groups share the weights as with fsdp
pp        each process has some of the blocks (parallel/pipeline_parallel.py)

The gradients of all processes are summed, not averaged, because the loss is divided by the number of targets in all of
them.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from monoblock.nn.transformer import Transformer
from monoblock.parallel.tensor_parallel import check_splittable, split_model, to_local
from monoblock.parallel.world import DATA, SINGLE_PROCESS, TENSOR, World

SINGLE_BUCKET_MB = 2**20  # more than any model has


class MicroBatch(Protocol):
    """The inputs of a model by name, and the labels; the first dimension of each tensor is that of the rows."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...
    @property
    def labels(self) -> Tensor: ...
    def split(self, num_micro_batches: int, /) -> Sequence[Self]: ...
    def to(self, device: torch.device, /) -> Self: ...


LossFunction = Callable[[Any, dict[str, Tensor], Tensor], Tensor]  # of a model, its inputs and the labels
Metrics = Callable[[Any, dict[str, Tensor], Tensor], dict[str, float]]  # the same; each metric is a sum over targets


class Strategy:
    """One process with all weights; the base class of strategies for several processes."""

    is_sharded = False  # whether a process stores only a part of the weights
    has_schedule = False  # whether `run_schedule` computes the gradients, because no process has the whole model
    description = "a single process"
    notes: Sequence[str] = ()  # what could not be split, known after `prepare`
    split_bytes = 0  # the size of the whole model, if its weights are split, known after `prepare`
    weights_elsewhere: frozenset[str] = frozenset()  # names of weights of which this process has no part

    def __init__(self, world: World = SINGLE_PROCESS) -> None:
        self.world = world

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError if the weights of this model cannot be distributed."""

    def prepare(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Distribute the weights of a model in place, and return the module to compute losses with.

        dtype: the dtype in which the model computes, if it is not that of the weights.
        """
        return model

    def compute_loss(self, module: nn.Module, loss: LossFunction, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Return the loss, computed with the module that `prepare` returned."""
        return loss(module, inputs, labels)

    def accumulate(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
        """Return a context for the forward and backward pass of one micro-batch of a step."""
        return nullcontext()

    def count_micro_batches(self, accumulate: int, rows: int) -> int:
        """Return the number of micro-batches of a batch of `rows`; `accumulate` is what the recipe says."""
        return accumulate

    def run_schedule(self, module: nn.Module, micro_batches: Sequence[MicroBatch], loss: LossFunction) -> Tensor:
        """Add the gradients of micro-batches to those of the weights; return the sum of their losses."""
        raise NotImplementedError

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of all gradients, those of all processes included."""
        norms = [total_norm(group) for group in group_by_mesh(model.parameters())] or [total_norm([])]
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    def evaluate_batch(self, metrics: Metrics, model: nn.Module, batch: MicroBatch) -> dict[str, float]:
        """Return the metrics of a batch, each summed over its targets."""
        return metrics(model, batch.inputs, batch.labels)

    def free_gathered_weights(self, model: nn.Module) -> None:
        """Free what a forward pass without a backward pass has gathered."""

    def whole_model(self, model: nn.Module) -> nn.Module | None:
        """Return the model with all weights in the main process, and None in the others; all must call this.

        A model whose weights were split is in CPU memory.
        """
        return model if self.world.is_main else None

    def whole_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors that are split like weights, whole in the main process; every process must call this."""
        return tensors


class _LossModule(nn.Module):
    """Compute the loss of a model, so that DistributedDataParallel wraps both, and one compiled graph has both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return loss(self.model, inputs, labels)


class DataParallel(Strategy):
    """Every process has all weights; buckets of gradients are summed while the backward pass still runs."""

    description = "each has all weights and reads its part of every batch"

    def prepare(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        assert self.world.mesh is not None
        group = self.world.mesh.get_group(DATA)
        # A compiled graph is split at the buckets, so that they are summed during the backward pass. This costs a few
        # per cent; a single process has nothing to send, and needs one bucket only.
        has_others = self.world.data_size > 1
        optional = ("segment", "mask_token")  # inputs may lack segments and masked patches
        names = [name for name, _ in model.named_parameters()]
        uses_all_weights = type(model) is Transformer and not any(part in name for part in optional for name in names)
        torch._dynamo.config.optimize_ddp = has_others
        replica = DistributedDataParallel(
            _LossModule(model),
            process_group=group,
            find_unused_parameters=not uses_all_weights,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if has_others else SINGLE_BUCKET_MB,
        )
        replica.register_comm_hook(group, lambda group, bucket: _sum_bucket(group, bucket))  # it checks annotations
        return replica

    def compute_loss(self, module: nn.Module, loss: LossFunction, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        value: Tensor = module(loss, inputs, labels)
        return value

    def accumulate(self, module: nn.Module, *, is_last: bool) -> AbstractContextManager[object]:
        assert isinstance(module, DistributedDataParallel)
        return nullcontext() if is_last else module.no_sync()


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over all processes; DistributedDataParallel would average it."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: Any = work.get_future()
    result: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return result


class ShardedStrategy(Strategy):
    """Each process stores a part of the weights; a base class.

    sequence: whether processes that share matrices also divide the positions of norms and residual connections.
    """

    is_sharded = True

    def __init__(self, world: World, *, sequence: bool = False) -> None:
        super().__init__(world)
        self.sequence = sequence

    def check_model(self, model: nn.Module) -> None:
        assert self.world.mesh is not None
        if self.world.mesh[TENSOR].size() > 1:
            check_splittable(model)

    def prepare(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        assert self.world.mesh is not None
        self._without_weights, self.split_bytes = copy_without_weights(model), count_bytes(model)
        if self.world.mesh[TENSOR].size() > 1:
            self.notes = split_model(model, self.world.mesh[TENSOR], sequence=self.sequence)
        return self._place(model, self.world.mesh, dtype)

    def _place(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
        """Move the part of the weights that this process stores to its device."""
        raise NotImplementedError

    def whole_model(self, model: nn.Module) -> nn.Module | None:
        weights = self.whole_tensors(model.state_dict())
        if not self.world.is_main:
            return None
        whole = copy.deepcopy(self._without_weights)
        whole.load_state_dict(weights, assign=True)
        return whole.train(model.training)

    def whole_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        whole = {}
        for name, tensor in tensors.items():  # one after the other
            full = whole_tensor(tensor)
            if self.world.is_main:
                whole[name] = full.detach().cpu()
        return whole


class TensorParallel(ShardedStrategy):
    """Each process stores and computes a part of every matrix; all read the same batch."""

    description = "each stores and computes a part of every matrix"

    def _place(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
        return model.to(torch.device(mesh.device_type))


class FullySharded(ShardedStrategy):
    """Each process stores a part of every weight, of its gradient and of its optimizer state (ZeRO stage 3).

    In a mesh with a tensor dimension, the parts are those of matrices that are split already.
    """

    description = "each stores a part of the weights and reads its part of every batch"

    def __init__(
        self, world: World, *, reshard_after_forward: bool = True, offload: bool = False, sequence: bool = False
    ) -> None:
        super().__init__(world, sequence=sequence)
        self.reshard_after_forward, self.offload = reshard_after_forward, offload

    def _place(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
        options: dict[str, Any] = {
            "mesh": mesh[DATA],
            "shard_placement_fn": lambda weight: _choose_dimension(weight, self.world.data_size),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and mesh.device_type != "cpu" else OffloadPolicy(),
        }
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # of two small sums
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # it is not written to
        stacks = [model.encoder, model.decoder] if isinstance(model, Transformer) else []
        order = [block for stack in stacks if stack is not None for block in stack.blocks]
        for block in order:
            if order.count(block) == 1:  # else several layers share its weights
                fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def free_gathered_weights(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        model.reshard()


def _choose_dimension(weight: nn.Parameter, parts: int) -> Shard:
    """Choose a dimension of a weight that can be divided evenly, one that is not yet divided if there is one.

    Without such a dimension it is the first, which may be divided unevenly.
    """
    divided = [shard.dim for shard in getattr(weight, "placements", ()) if isinstance(shard, Shard)]
    dims = [dim for dim, size in enumerate(to_local(weight).shape) if size % parts == 0]
    return Shard(min(dims, key=lambda dim: (dim in divided, dim), default=0))


def copy_without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose weights and buffers are on the meta device, so that it needs no memory."""
    replaced: dict[int, object] = {}
    for weight in model.parameters():
        replaced[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    for buffer in model.buffers():
        replaced[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, replaced)


def count_bytes(model: nn.Module) -> int:
    """Return the number of bytes of the weights and buffers of a model."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(whole: Tensor, other: Tensor) -> Tensor:
    """Split a tensor among processes like another one; all of them have the whole tensor."""
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole, other.device_mesh, other.placements, src_data_rank=None)


def mesh_of(tensor: Tensor) -> object:
    """Return the mesh among whose processes a tensor is split, or None if each process has all of it."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def group_by_mesh(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group weights with gradients that can be used in one operation: those on the same mesh, and plain tensors."""
    groups: dict[object, list[nn.Parameter]] = {}
    for weight in weights:
        if weight.grad is not None:
            groups.setdefault(mesh_of(weight), []).append(weight)
    return list(groups.values())


def total_norm(weights: Iterable[nn.Parameter]) -> Tensor:
    return whole_tensor(nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None]))


T = TypeVar("T")
MEMORY_MARGIN = 1.25  # memory to generate with a whole model, relative to that of its weights


def has_room(strategy: Strategy, device: torch.device) -> bool:
    """Return whether the whole model fits on the device of the main process; every process must call this."""
    if not strategy.is_sharded:
        return True
    has_room = device.type != "cuda"
    if not has_room:
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        has_room = MEMORY_MARGIN * strategy.split_bytes < free
    return bool(strategy.world.broadcast(has_room))


def call_with_whole_model(
    strategy: Strategy, model: nn.Module, device: torch.device, function: Callable[[nn.Module], T], otherwise: T
) -> T | None:
    """Return what a function of the whole model returns in the main process, and None in the others.

    Every process must call this. The time that the function takes does not count against the time-out.

    device: where the whole model is put; its weights may be split among the processes.
    otherwise: what to return if it does not fit there.
    """
    world = strategy.world
    if not has_room(strategy, device):
        return otherwise if world.is_main else None
    whole, result = strategy.whole_model(model), None
    with world.long_work():
        if whole is not None:
            result = function(whole.to(device))
    return result
