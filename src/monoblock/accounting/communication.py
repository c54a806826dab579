"""The bytes that a rank sends in a training step, and how long that takes.

With n ranks in a group, and rings, which send every element as seldom as possible, a rank sends

    all-reduce              2 (n-1)/n of the tensor
    all-gather              (n-1)/n of the gathered tensor
    reduce-scatter          (n-1)/n of the tensor before it is scattered
    point to point          the tensor

    ddp       an all-reduce of the fp32 gradients, once a step
    fsdp      an all-gather of the 16-bit weights in the forward and again in the backward pass, and a reduce-scatter of
              the fp32 gradients, for every micro-batch
    tp        in every block an all-reduce of the 16-bit hidden states after attention (and cross-attention) and after
              the feed-forward network, and of their gradients in the backward pass; checkpointing repeats those of the
              forward pass, also if it is selective, because it keeps the parts of a sum but not the sum; one of the
              embedding in the forward pass, one of the head in the backward pass.  The last all-reduce of a block is
              always counted as repeated, but without dropout or a norm after it torch stops the recomputation before it
    pp        for every micro-batch the hidden states to the next stage, and their gradients to the stage before
"""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.accounting.flops import BatchShape
from monoblock.accounting.parallel import ParallelPlan, split_stages
from monoblock.config.model import ModelConfig
from monoblock.config.parts import CheckpointMode


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a rank sends along one dimension of the plan in a step."""

    dimension: str
    operation: str
    bytes: int
    between_nodes: bool
    overlaps: bool  # whether it happens while the rank computes

    def seconds(self, intra_bandwidth: float, inter_bandwidth: float) -> float:
        """Return the time at a bandwidth in bytes per second of one GPU, within a node and between nodes."""
        return self.bytes / (inter_bandwidth if self.between_nodes else intra_bandwidth)


def all_reduce_bytes(size: int, ranks: int) -> int:
    return 2 * size * (ranks - 1) // ranks


def all_gather_bytes(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-gather or a reduce-scatter of `size` bytes."""
    return size * (ranks - 1) // ranks


def count_tensor_all_reduces(config: ModelConfig, *, checkpointing: CheckpointMode) -> dict[str, int]:
    """Count the all-reduces of a tensor-parallel group in a pass, by stack; those of embedding and head are `ends`."""
    passes = 3 if checkpointing else 2
    counts = {
        name: passes * sum(len(block.sublayers) for block in stack.layers()) for name, stack in config.stacks.items()
    }
    return {**counts, "ends": 2}


def step_transfers(
    config: ModelConfig,
    shape: BatchShape,
    plan: ParallelPlan,
    *,
    checkpointing: CheckpointMode = False,
    micro_batches: int = 1,
    gpus_per_node: int,
) -> list[Transfer]:
    """Return what a rank of the largest pipeline stage sends in a step of `micro_batches` passes."""
    parameters = max(stage.parameters.total for stage in split_stages(config, plan))
    sent = {
        "data": ("all-reduce of gradients", all_reduce_bytes(4 * parameters, plan.data), True),
        "shard": (
            "all-gather of weights, reduce-scatter of gradients",
            micro_batches * (2 * all_gather_bytes(2 * parameters, plan.shard))
            + micro_batches * all_gather_bytes(4 * parameters, plan.shard),
            True,
        ),
        "tensor": (
            "all-reduce of hidden states",
            micro_batches * _tensor_bytes(config, shape, plan, checkpointing),
            False,
        ),
        "pipeline": (
            "hidden states to the next stage, gradients back",
            micro_batches * 2 * plan.stream_bytes * _hidden_elements(config, shape),
            False,
        ),
    }
    return [
        Transfer(
            dimension=dimension,
            operation=operation,
            bytes=size,
            between_nodes=plan.crosses_nodes(dimension, gpus_per_node),
            overlaps=overlaps,
        )
        for dimension, (operation, size, overlaps) in sent.items()
        if getattr(plan, dimension) > 1
    ]


def _hidden_elements(config: ModelConfig, shape: BatchShape) -> int:
    return shape.batch * shape.target * config.width


def _tensor_bytes(config: ModelConfig, shape: BatchShape, plan: ParallelPlan, checkpointing: CheckpointMode) -> int:
    counts = count_tensor_all_reduces(config, checkpointing=checkpointing)
    total = 0
    for name, count in counts.items():
        length = shape.source if name == "encoder" else shape.target
        total += count * all_reduce_bytes(2 * shape.batch * length * config.width, plan.tensor)
    return -(-total // plan.pipeline)
