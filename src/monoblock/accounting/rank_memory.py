"""The peak memory of a training step on one rank, as PyTorch's allocator counts it.

The trainer keeps fp32 weights and computes under autocast in 16 bits. FSDP keeps fp32 shards and gathers the weights of
one layer at a time in 16 bits. A rank therefore holds

    weights, gradients     4 bytes a parameter each, divided by the number of shards; with ddp the gradients are views
                           of buckets, which exist all the time
    optimizer              4 bytes for each state (two with AdamW), likewise
    weight copies          without FSDP: 2 bytes for each weight of a matrix, from the forward pass to its backward pass
    weight copies          with FSDP: 2 bytes for each weight of matrices that nn/linear.py joins to one product
    gathered layers        with FSDP: two blocks, the embedding and the head in 16 bits, and the buffers of the
                           gradients of one block: 2 bytes a weight, and 4 while they are summed over the ranks
    activations            what activations.py counts, with 16-bit inputs of matrices; without FSDP the residual stream
                           and so the input of every norm is fp32; with FSDP it has 16 bits, but an RMS norm saves its
                           input in fp32 and its normalized input
      checkpointing        the input of each block, with selective checkpointing also the outputs of its products, as
                           kept_activations.py counts them; the rest of a block while it is recomputed; and a bias on
                           the scores in fp32, which recomputed blocks hold to the end
    loss                   with tp and pp, and with few classes: the fp32 log-softmax, and two gradients of that size at
                           the start of the backward pass; otherwise it is computed together with the last matrix
                           product (fused_loss.py): the logits of a part of the tokens in 16 bits in the forward pass,
                           the gradients of the product until the backward pass, and there two of each

The peak is smaller than the sum, because the backward pass releases the activations of a layer when it computes its
gradients. `find_peak` goes through the backward pass layer by layer and takes the largest total. A pipeline stage holds
the activations of as many micro-batches as there are stages from it on (the schedule 1F1B).

Not counted: the CUDA context, buffers of NCCL and memory lost to fragmentation, which PyTorch does not count as
allocated either. The step is not compiled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from monoblock.accounting.flops import BatchShape
from monoblock.accounting.memory import OPTIMIZER_STATES
from monoblock.accounting.parallel import ParallelPlan, RankParameters
from monoblock.accounting.rank_segments import Segment, count_outside_blocks, model_segments, split_stages, tied_table
from monoblock.config.model import ModelConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import ConfigError, did_you_mean

WORKSPACE_BYTES = 32 * 2**20  # cuBLAS on a Hopper GPU


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a training step on one rank, in bytes; `peak` is its largest total, in the phase `peak_at`."""

    weights: int
    gradients: int
    optimizer: int
    weight_copies: int
    gathered_layers: int
    activations: int
    loss: int
    workspace: int
    peak: int
    peak_at: str
    stage: int = 0  # the pipeline stage, counted from 0

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


# -- the peak ----------------------------------------------------------------------------------------------------------


def find_peak(
    segments: list[Segment], base: int, *, buffers: LayerBuffers, in_flight: int, shards: int, accumulated: bool
) -> tuple[int, str]:
    """Return the largest total of a step, in bytes, and the phase in which it is reached.

    base: the memory that is in use all the time.
    buffers: those of FSDP.
    in_flight: the number of micro-batches whose activations a pipeline stage holds.
    accumulated: whether all gradients exist from the start: those of earlier micro-batches, or the buckets of ddp.
    """
    gradients = {
        segment.name: -(-4 * (segment.parameters.total + segment.tied_gradients) // shards) for segment in segments
    }
    kept = sum(segment.saved + segment.copies for segment in segments)
    live = kept + (in_flight - 1) * sum(segment.saved for segment in segments)
    ready = sum(gradients.values()) if accumulated else 0
    forward = sum(segment.cached_copies + segment.forward_working for segment in segments)
    totals = [(base + ready + live + forward + buffers.layer, "the end of the forward pass")]
    is_summing = False
    for segment in reversed(segments):
        own = 0 if accumulated else gradients[segment.name]
        at_start = segment.recomputed + segment.working + buffers.at_start(segment, is_summing)
        totals.append((base + ready + live + at_start, segment.name))
        ready += own
        live -= segment.saved + segment.copies
        at_end = segment.end_working + buffers.at_end(segment, is_summing)
        totals.append((base + ready + live + at_end, segment.name))
        is_summing = is_summing or segment.is_block
    return max(totals)


class LayerBuffers(NamedTuple):
    """The buffers of FSDP in bytes: all the time, and in addition in the phases of a step."""

    root: int = 0  # embedding and head, gathered
    head: int = 0  # the gradient of the head, which waits for that of the embedding
    layer: int = 0  # a gathered block

    @property
    def block(self) -> int:
        """Two gathered blocks, the gradients of one in 16 bits and of another in fp32."""
        return 5 * self.layer

    def at_start(self, segment: Segment, is_summing: bool) -> int:
        """Return the buffers at the start of the backward pass of a segment, while a later block is being summed."""
        return self.head + (2 if segment.is_block else 1) * self.layer + (2 * self.layer if is_summing else 0)

    def at_end(self, segment: Segment, is_summing: bool) -> int:
        """Return the buffers at its end, with the gradients of a block, or at the very end of all others."""
        if segment.name == "input":
            return 2 * self.layer + max(2 * self.root, self.root + 2 * self.head)
        return self.at_start(segment, is_summing) + (self.layer if segment.is_block else 0)


def layer_buffers(segments: list[Segment], shards: int) -> LayerBuffers:
    """Return the buffers of FSDP.

    A block and the next one are gathered in 16 bits; in the backward pass also the 16-bit gradients of the block exist,
    and the fp32 gradients of the block before, which are being summed. The gradients of the head wait in 16 bits. At
    the very end the gradients of embedding and head exist in 16 bits and in fp32, when these layers are no longer
    gathered; if they are tied, before that those of both and their sum.
    """
    if shards == 1:
        return LayerBuffers()
    largest = max((segment.parameters.total for segment in segments if segment.is_block), default=0)
    root = sum(segment.parameters.total for segment in segments if not segment.is_block)
    head = sum(segment.parameters.total + segment.tied_gradients for segment in segments if segment.name == "loss")
    return LayerBuffers(2 * root, 2 * head, 2 * largest)


def rank_memory(
    config: ModelConfig,
    shape: BatchShape,
    plan: ParallelPlan,
    *,
    optimizer: str = "adamw",
    checkpointing: CheckpointMode = False,
    micro_batches: int = 1,
) -> RankMemory:
    """Compute the memory of a training step on the rank that needs most.

    `shape.batch` is the number of sequences in a micro-batch of a rank, or of a tensor-parallel group.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise ConfigError(
            f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZER_STATES)}"
            f"{did_you_mean(optimizer, OPTIMIZER_STATES)}"
        )
    segments = model_segments(config, shape, plan, checkpointing=checkpointing)
    stages = split_stages(segments, plan.pipeline)
    table = tied_table(config, count_outside_blocks(config, plan.tensor))
    if plan.pipeline > 1 and table:  # the first and the last stage have a copy each of the tied embedding
        first, last = stages[0][0], stages[-1][-1]
        stages[0][0] = first._replace(tied_gradients=0, working=0)
        stages[-1][-1] = last._replace(parameters=RankParameters(last.parameters.total + table, 0), tied_gradients=0)
    memories = [_stage_memory(stage, plan, optimizer, number, micro_batches) for number, stage in enumerate(stages)]
    return max(memories, key=lambda memory: memory.peak)


def _stage_memory(
    segments: list[Segment], plan: ParallelPlan, optimizer: str, stage: int, micro_batches: int
) -> RankMemory:
    total = sum(segment.parameters.total for segment in segments)
    matrices = sum(segment.parameters.matrices for segment in segments)
    matrix_states, other_states = OPTIMIZER_STATES[optimizer]
    states = matrix_states * matrices + other_states * (total - matrices)
    weights, states_bytes = -(-4 * total // plan.shard), -(-4 * states // plan.shard)
    buffers = layer_buffers(segments, plan.shard)
    in_flight = min(micro_batches, plan.pipeline - stage)
    loss = sum(
        segment.saved + max(segment.working, segment.forward_working) for segment in segments if segment.name == "loss"
    )
    peak, peak_at = find_peak(
        segments,
        weights + states_bytes + buffers.root + WORKSPACE_BYTES,
        buffers=buffers,
        in_flight=in_flight,
        shards=plan.shard,
        accumulated=micro_batches > 1 or plan.data > 1,
    )
    saved = sum(segment.saved for segment in segments if segment.name != "loss")
    return RankMemory(
        weights=weights,
        gradients=weights,
        optimizer=states_bytes,
        weight_copies=sum(segment.copies + segment.cached_copies for segment in segments),
        gathered_layers=buffers.root + buffers.head + buffers.block,
        activations=in_flight * saved + max(segment.recomputed for segment in segments),
        loss=loss,
        workspace=WORKSPACE_BYTES,
        peak=peak,
        peak_at=peak_at,
        stage=stage,
    )
