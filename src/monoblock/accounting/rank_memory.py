"""The peak memory of a training step on one rank, in closed forms that can be checked by hand.

The trainer keeps fp32 weights and computes under autocast in 16 bits. FSDP keeps fp32 shards and gathers the weights of
a block at a time in 16 bits. With p parameters on the rank (of its pipeline stage, and its part of every block), s
shards, N tokens of a micro-batch, width D, V classes, and r = 4 bytes an element of the residual stream (FSDP: 2), a
rank holds

    weights, gradients    4·p/s bytes each
    optimizer             4·p/s for each state, of which AdamW has two
    weight copies         without FSDP: 2 for each weight in matrices of blocks, from the forward to the backward pass;
                          with full checkpointing only in the forward pass, with selective checkpointing never
    gathered layers       with FSDP: 2 for each of o weights outside the blocks and, for a block of b weights, 2·b in
                          the forward pass; 10·b in the backward pass, where two blocks are gathered, one has gradients
                          in 16 bits, and those of another are summed over the ranks in fp32; there the gradients of the
                          h weights of the head wait in 16 bits, 2·h; at the end those of all o weights are summed, 4·o
                          more (if tied, those of both uses and their sum: 4·h), when the two blocks still exist, 4·b
    activations           what activations.py counts, in 16 bits; but norms save their input in fp32, 2·N·D bytes more,
                          and with FSDP an RMS norm also its normalized input, 4·N·D more; and cross-attention converts
                          the encoder output twice
      checkpointing       of a block r·N·D for its input, with selective checkpointing also the outputs of its products
      pipeline            those of p - i micro-batches in stage i of p stages, counted from 0 (the schedule 1F1B)
    a block, backward     all activations of a block, while it is recomputed also its weight copies, and the gradients
                          of its F hidden features, 2·N·F bytes each (the gradient of the residual stream takes the
                          place of the input of the next norm); with FSDP at least 28·N·D for the RMS norm after the
                          last block, which has seven fp32 tensors
    loss, stored          12·N·V bytes: the log-softmax and two gradients of that size, in fp32; 2·D·V for a weight copy
    loss, fused           4·D·V: the gradient of the last weight, from the forward pass on; also in the forward pass 2
                          for each of at most 2**29 logits, and 2·D·V for a weight copy; or in the backward pass 4·D·V,
                          because the gradient is multiplied (with FSDP: 2·D·V, because it is converted, and 2·D·V for
                          a weight copy if V is padded); and the input of the product

The backward pass exchanges the activations of one block after the other for its gradients, so that the total is largest
at one of its ends. The peak is weights and optimizer, and the largest of these, each with the layers gathered there:

    start of the backward pass    activations, weight copies, and the loss
    last block                    activations, weight copies, gradients of the head, and what a block needs
    first block                   gradients of all other blocks, and what a block needs
    input                         all gradients, and without FSDP 8·D·V for an embedding that is also the output matrix:
                                  the gradient of the lookup in fp32, and the sum of both

With several micro-batches, and with ddp, whose buckets exist all the time, all gradients are there in each of them.

tests/accounting/test_planned_memory.py compares this with measured peaks, within 10 %. Not counted: the CUDA context,
buffers of NCCL and memory lost to fragmentation, which PyTorch does not count as allocated either. The step is not
compiled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from monoblock.accounting.activations import (
    SavedActivations,
    block_activations,
    block_mode,
    head_activations,
    kept_activations,
    norm_elements,
    outside_activations,
)
from monoblock.accounting.flops import BatchShape
from monoblock.accounting.fused_loss import fuses_loss, output_linear, pad_classes, rows_at_a_time
from monoblock.accounting.memory import activation_bytes, optimizer_states
from monoblock.accounting.parallel import ParallelPlan, narrow_block, narrow_model, rank_block_parameters, split_stages
from monoblock.accounting.parameters import count_norms
from monoblock.config.model import BlockConfig, ModelConfig, NormConfig
from monoblock.config.parts import CheckpointMode

WORKSPACE_BYTES = 32 * 2**20  # cuBLAS on a Hopper GPU
RMS_NORM_BYTES = 28  # an element: seven fp32 tensors, in the backward pass of an RMS norm of 16-bit input


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a training step on one rank, in bytes; `peak` is its largest total, in the phase `peak_at`.

    `activations` includes what the backward pass of a block needs; not all parts exist at the peak.
    """

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


class BlockBytes(NamedTuple):
    """The bytes of a block in a step, besides its state."""

    kept: int  # activations from the forward to the backward pass
    copies: int  # 16-bit copies of its weights
    backward: int  # what its backward pass needs: all activations, their gradients, and recomputed copies


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
    stages = split_stages(config, plan)
    sizes = {
        key: _block_bytes(key[1], shape, shape.length(key[0]), plan, checkpointing)
        for stage in stages
        for key in set(stage.blocks)
    }
    outside, loss = _outside_bytes(config, shape, plan, bool(checkpointing)), _loss_bytes(config, shape, plan)
    memories = []
    for number, stage in enumerate(stages):
        blocks = [sizes[key] for key in stage.blocks]
        total = stage.parameters.total
        weights = -(-4 * total // plan.shard)
        states = -(-4 * optimizer_states(optimizer, *stage.parameters) // plan.shard)
        outer, last, layer = stage.outside, stage.head, stage.largest_block
        at_start = at_block = 0
        at_end = 8 * stage.tied
        if plan.shard > 1:
            at_start = 2 * outer + 2 * layer
            at_block = 2 * (outer + last) + 10 * layer
            at_end = 4 * outer + max(2 * outer, 4 * last) + 4 * layer
        kept = min(micro_batches, plan.pipeline - number) * (outside + sum(block.kept for block in blocks))
        copies = sum(block.copies for block in blocks)
        recomputed = max(block.backward - block.kept for block in blocks)
        own_loss = loss if number == plan.pipeline - 1 else 0
        head, rest = (-(-4 * count // plan.shard) for count in (stage.head, total - stage.largest_block))
        if micro_batches > 1 or plan.data > 1:
            ready = head = rest = weights
        else:
            ready = 0
        moments = {
            "start of the backward pass": ready + kept + copies + own_loss + at_start,
            "last block": head + kept + (0 if checkpointing else copies) + recomputed + at_block,
            "first block": rest + max(block.backward for block in blocks) + at_block,
            "input": weights + at_end,
        }
        peak_at = max(moments, key=lambda name: moments[name])
        memories.append(
            RankMemory(
                weights=weights,
                gradients=weights,
                optimizer=states,
                weight_copies=copies,
                gathered_layers=at_block,
                activations=kept + recomputed,
                loss=own_loss,
                workspace=WORKSPACE_BYTES,
                peak=weights + states + WORKSPACE_BYTES + moments[peak_at],
                peak_at=peak_at,
                stage=number,
            )
        )
    return max(memories, key=lambda memory: memory.peak)


def _to_bytes(saved: SavedActivations) -> int:
    return sum(activation_bytes(saved, "bf16"))


def _norm_extra(norm: NormConfig | None, plan: ParallelPlan) -> int:
    """Return the bytes that a norm saves for an element of its input beyond two."""
    again = norm is not None and norm.row.saves_normalized and plan.shard > 1
    return 2 * (norm_elements(norm, 1) + again)


def _block_bytes(
    block: BlockConfig, shape: BatchShape, length: int, plan: ParallelPlan, checkpointing: CheckpointMode
) -> BlockBytes:
    """Count the bytes of a block on one rank."""
    narrow, feedforward, rows = narrow_block(block, plan.tensor), block.feedforward, shape.batch * length
    elements, norm_extra, mode = rows * block.width, _norm_extra(block.norm, plan), block_mode(block, checkpointing)
    saved = _to_bytes(block_activations(narrow, shape, length, fused=True)) + count_norms(block) * elements * norm_extra
    if block.cross:
        saved += 4 * shape.batch * shape.source * block.width
    kept = saved
    if mode:  # the input of the block is one of the kept activations, and has the precision of the residual stream
        kept = _to_bytes(kept_activations(narrow, shape, length, checkpointing=mode, fused=True))
        kept += (plan.stream_bytes - 2) * elements
    copies = 0 if plan.shard > 1 else 2 * rank_block_parameters(block, plan.tensor).matrices
    hidden = rows * narrow.feedforward.hidden * (feedforward.experts.top_k if feedforward.experts else 1)
    backward = saved + 2 * hidden * (3 if feedforward.gated else 2) + (copies if mode else 0)
    if block.norm.row.saves_normalized and plan.shard > 1:
        backward = max(backward, kept + RMS_NORM_BYTES * elements)
    return BlockBytes(kept, 0 if mode == "selective" else copies, backward)


def _outside_bytes(config: ModelConfig, shape: BatchShape, plan: ParallelPlan, recomputed: bool) -> int:
    """Count the bytes of activations outside the blocks."""
    narrow = narrow_model(config, plan.tensor)
    saved = _to_bytes(outside_activations(narrow, shape, fused=True, recomputed=recomputed))
    rows = {name: shape.batch * shape.length(name) for name in config.stacks}
    norms = sum(rows[name] * _norm_extra(stack.norm, plan) for name, stack in config.stacks.items())
    return saved + norms * config.width


def _loss_bytes(config: ModelConfig, shape: BatchShape, plan: ParallelPlan) -> int:
    """Count the bytes of the head and the loss."""
    narrow = narrow_model(config, plan.tensor)
    linear, head = output_linear(narrow), _to_bytes(head_activations(narrow, shape, with_logits=False))
    rows = shape.batch * (shape.target if linear.applied_to == "tokens" else 1)
    if not fuses_loss(config, plan):
        return head + 12 * rows * linear.outputs + (0 if plan.shard > 1 else 2 * linear.num_weights)
    columns = pad_classes(linear.outputs)
    logits, weights, hidden = rows_at_a_time(rows, columns) * columns, columns * linear.inputs, rows * linear.inputs
    if plan.shard > 1:
        padded = 2 * weights if columns > linear.outputs else 0
        return head + padded + 4 * weights + 2 * max(logits, weights) + 2 * hidden
    return head + 4 * weights + max(4 * weights, 2 * weights + 2 * logits + 4 * hidden) + 2 * hidden
