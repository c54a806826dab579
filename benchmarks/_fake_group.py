"""Count the memory of one rank of many without these ranks: a fake process group, and tensors without data.

`sharded_state_bytes` places every weight with DTensor and `fully_shard` and adds up the shards of rank 0.
`step_peak_bytes` runs a training step on fake tensors, which have shapes but no data, and follows every allocation.
Kernels of a GPU that save less than those of a CPU are replaced by functions that save as much; attention is a single
operator, as on a GPU, so that selective checkpointing keeps its output and log-sum-exp. The loss with the last matrix
product runs the code of the GPU operator, in which only the functions that write to existing tensors do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monoblock.accounting.parallel import ParallelPlan, divides_kv_heads, narrow_model
from monoblock.config.model import ModelConfig
from monoblock.config.parts import CheckpointMode
from monoblock.kernels import linear_cross_entropy as fused_loss
from monoblock.model import Transformer
from monoblock.nn.attention import Attention
from monoblock.nn.embedding import Embedding
from monoblock.nn.feedforward import FeedForward
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.optimizer import build_optimizers

ALIGNMENT = 512  # bytes: the caching allocator of CUDA rounds up to this
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def fake_group(plan: ParallelPlan) -> Iterator[DeviceMesh]:
    """Open a fake process group of `plan.size` ranks, of which this process is rank 0; yield its mesh."""
    dist.init_process_group("fake", rank=0, world_size=plan.size, store=FakeStore())
    try:
        sizes = (plan.data * plan.shard, plan.tensor)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
    finally:
        dist.destroy_process_group()


# -- weights, gradients and optimizer states -------------------------------------------------------------------------


def placements(model: Transformer, tensor: int) -> dict[str, Placement]:
    """Return how a tensor-parallel group divides each weight, by name; weights that are not named are replicated."""
    chosen: dict[str, Placement] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            divided = divides_kv_heads(module.config, tensor)
            for part in ("query", "key", "value"):
                for kind in ("weight", "bias"):
                    chosen[f"{name}.{part}.{kind}"] = Shard(0) if part == "query" or divided else Replicate()
            chosen[f"{name}.output.weight"] = Shard(1)
        elif isinstance(module, FeedForward):
            for part in ("up", "gate"):
                chosen[f"{name}.{part}.weight"] = chosen[f"{name}.{part}.bias"] = Shard(0)
            chosen[f"{name}.down.weight"] = Shard(1)
        elif isinstance(module, Embedding):
            chosen[f"{name}.token.weight"] = Shard(0)
    chosen["head.output.weight"] = Shard(0)
    return chosen


def sharded_state_bytes(config: ModelConfig, plan: ParallelPlan) -> int:
    """Return the bytes of weights, gradients and AdamW's two states on rank 0 of a fake group."""
    with fake_group(plan) as mesh:
        with torch.device("meta"):
            model = Transformer(config)
        chosen = placements(model, plan.tensor)
        for name, weight in list(model.named_parameters()):
            parent, _, leaf = name.rpartition(".")
            placement = chosen.get(name, Replicate())
            local = nn.Parameter(distribute_tensor(weight, mesh["tensor"], [placement]))
            model.get_submodule(parent).register_parameter(leaf, local)
        if plan.shard > 1:
            shard_blocks(model, mesh["shard"])
        locals_ = [weight.to_local() for weight in model.parameters() if isinstance(weight, DTensor)]
        return 4 * sum(4 * weight.numel() for weight in locals_)


def shard_blocks(model: Transformer, mesh: DeviceMesh) -> None:
    for stack in (model.encoder, model.decoder):
        for block in stack.blocks if stack is not None else []:
            fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)


# -- a whole step ----------------------------------------------------------------------------------------------------


class AllocationTracker(TorchDispatchMode):
    """Add up the storage of all tensors that exist; `peak` is the largest total since it was last set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.current = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = 0
            weakref.finalize(storage, self._forget, storage._cdata)
        self.measure(storage)

    def measure(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its size, which FSDP sets to zero when it releases gathered weights."""
        if storage._cdata in self.sizes:
            size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            self.current += size - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = size
            self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.current -= self.sizes.pop(key, 0)


class GpuRmsNorm(torch.autograd.Function):
    """Save the input and one statistic for each row, as the fused kernel of a GPU does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@torch.library.custom_op("fake_gpu::attention", mutates_args=())
def gpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, as the flash kernel does; the output is laid out as the queries are.

    It is one operator, so that selective checkpointing recognizes it as attention.
    """
    shape = (*q.shape[:3], v.shape[-1])
    transposed = (shape[0], shape[2], shape[1], shape[3])
    out = q.new_empty(shape) if q.is_contiguous() else q.new_empty(transposed).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attention_gradients(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    q, k, v, mask, *_ = ctx.saved_tensors
    grads = [torch.empty_like(x) for x in (q, k, v)]
    return *grads, torch.empty_like(mask) if ctx.needs_input_grad[3] else None


gpu_attention.register_fake(gpu_attention._init_fn)
gpu_attention.register_autograd(_attention_gradients, setup_context=_save_attention)


def _gpu_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        attn_mask = None if attn_mask is None else attn_mask.bfloat16()
    with torch.autocast("cpu", enabled=False):
        out: Tensor = gpu_attention(q, k, v, attn_mask)[0]
        return out


class GpuLoss(torch.autograd.Function):
    """Run the code of the operator `linear_cross_entropy`, so that every tensor inside it is counted."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = fused_loss._loss_and_gradients._init_fn(*inputs)
        fused_loss._save_gradients(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return fused_loss._scale_gradients(ctx, *grads)


def _gpu_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, rows: int, columns: int, **_: Any
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        sizes = (weight.requires_grad, False, rows, columns)
        loss: Tensor = GpuLoss.apply(x.to(torch.bfloat16), weight, bias, labels, -100, 0.0, *sizes)[0]
        return loss


def _fuses_loss(x: Tensor, weight: Tensor) -> bool:
    """Return what `supports_linear_cross_entropy` returns on a GPU under autocast."""
    return not isinstance(weight, DTensor)


def _write_nothing(*_: Any, **__: Any) -> None:
    pass


def _never(*_: Any) -> bool:  # a Mock would keep its arguments, and so the tensors
    return False


@contextmanager
def gpu_kernels(tracker: AllocationTracker, *, is_split: bool = False) -> Iterator[None]:
    """Replace what differs between a CPU and a GPU, and tell the tracker when a storage is resized.

    is_split: whether the weights stand for those of a tensor-parallel group, whose loss is not fused.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_measure(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.measure(storage)
        return result

    with ExitStack() as stack:
        for target, name, value in (
            (F, "rms_norm", lambda x, shape, weight=None, eps=None: GpuRmsNorm.apply(x, weight)),
            (F, "scaled_dot_product_attention", _gpu_attention),
            (torch.UntypedStorage, "resize_", resize_and_measure),
            (Embedding, "check_inputs", _write_nothing),  # it reads values, which fake tensors have not
            (fused_loss, "_replace_by_gradient", _write_nothing),
            (fused_loss, "_add_product", _write_nothing),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        supports = _never if is_split else _fuses_loss
        stack.enter_context(mock.patch("monoblock.training.loss.supports_linear_cross_entropy", supports))
        stack.enter_context(mock.patch("monoblock.training.loss.linear_cross_entropy", _gpu_loss))
        stack.enter_context(mock.patch("monoblock.nn.attention.supports_causal_attention", _never))
        stack.enter_context(mock.patch("monoblock.kernels.cpu.autograd.is_eager_training", _never))
        yield


def step_peak_bytes(
    config: ModelConfig, plan: ParallelPlan, batch: int, length: int, *, checkpointing: CheckpointMode = False
) -> int:
    """Return the peak of a training step on rank 0, as the trainer runs it when the optimizer states exist."""
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_group(plan)) if plan.size > 1 else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracker = stack.enter_context(AllocationTracker())
        stack.enter_context(gpu_kernels(tracker, is_split=plan.tensor > 1))
        model = Transformer(narrow_model(config, plan.tensor)).train().recompute(checkpointing)
        if plan.shard > 1 and mesh is not None:
            shard_blocks(model, mesh["shard"])
        optimizers, loss = build_optimizers(model), CrossEntropyLoss()
        ids = torch.zeros(batch, length, dtype=torch.long)
        inputs = {"source": ids, "target": ids} if config.family == "encoder-decoder" else {"source": ids}
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizers.step()
        optimizers.zero_grad()
        tracker.peak = 0
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, inputs, ids) / ids.numel()
        value.backward()
        optimizers.step()
        return tracker.peak
