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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from monoblock.nn.transformer import Transformer
from monoblock.parallel.gather import clip_gradients, copy_without_weights, count_bytes, gather_tensors
from monoblock.parallel.tensor_parallel import check_splittable, split_model
from monoblock.parallel.vocabulary import to_local
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
        """Return into how many micro-batches a batch of so many rows is split; `accumulate` is what the recipe says."""
        return accumulate

    def compute_gradients(
        self,
        module: nn.Module,
        micro_batches: Sequence[MicroBatch],
        backward: Callable[[MicroBatch], Tensor],
        loss: LossFunction,
    ) -> float | Tensor:
        """Return the sum of the losses of all micro-batches, and add their gradients to those of the weights.

        backward: a function that does this for one micro-batch, with the whole model.
        loss: the loss that it computes, for strategies in which no process computes the whole model.
        """
        total: float | Tensor = 0.0
        for number, micro_batch in enumerate(micro_batches, 1):
            with self.accumulate(module, is_last=number == len(micro_batches)):
                total = total + backward(micro_batch)
        return total

    def clip_gradients(self, model: nn.Module, max_norm: float) -> float | Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before."""
        return clip_gradients(model.parameters(), max_norm)

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
        torch._dynamo.config.optimize_ddp = has_others
        replica = DistributedDataParallel(
            _LossModule(model),
            process_group=group,
            find_unused_parameters=not _uses_all_weights(model),
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


def _uses_all_weights(model: nn.Module) -> bool:
    """Return whether every weight surely takes part in every forward pass."""
    optional = ("segment", "mask_token")  # inputs may lack segments and masked patches
    return type(model) is Transformer and not any(
        name in key for key, _ in model.named_parameters() for name in optional
    )


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
        return gather_tensors(tensors, keep=self.world.is_main)


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
        for block in _blocks_run_once(model):
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


def _blocks_run_once(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a Transformer, without blocks whose weights several layers share."""
    if not isinstance(model, Transformer):
        return []
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    order = [block for stack in stacks for block in stack.blocks]
    return [block for block in order if order.count(block) == 1]
