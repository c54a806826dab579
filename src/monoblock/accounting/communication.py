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


@dataclass(frozen=True)
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
    hidden = shape.batch * shape.target * config.width
    gathers = 2 * all_gather_bytes(2 * parameters, plan.shard) + all_gather_bytes(4 * parameters, plan.shard)
    sent = {  # dimension -> the operation, its bytes, and whether it overlaps with the computation
        "data": ("all-reduce of gradients", all_reduce_bytes(4 * parameters, plan.data), True),
        "shard": ("all-gather of weights, reduce-scatter of gradients", micro_batches * gathers, True),
        "tensor": (
            "all-reduce of hidden states",
            micro_batches * _tensor_bytes(config, shape, plan, checkpointing),
            False,
        ),
        "pipeline": (
            "hidden states to the next stage, gradients back",
            micro_batches * 2 * plan.stream_bytes * hidden,
            False,
        ),
    }
    return [
        Transfer(dimension, operation, size, plan.crosses_nodes(dimension, gpus_per_node), overlaps)
        for dimension, (operation, size, overlaps) in sent.items()
        if getattr(plan, dimension) > 1
    ]


def _tensor_bytes(config: ModelConfig, shape: BatchShape, plan: ParallelPlan, checkpointing: CheckpointMode) -> int:
    """Return the bytes of the all-reduces of a pass: of each sublayer two or three, and two of embedding and head."""
    passes, rows = 3 if checkpointing else 2, 2 * shape.target
    for name, stack in config.stacks.items():
        length = shape.length(name)
        rows += passes * length * sum(len(block.sublayers) for block in stack.layers())
    return -(-all_reduce_bytes(2 * shape.batch * rows * config.width, plan.tensor) // plan.pipeline)
