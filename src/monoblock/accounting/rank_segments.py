"""The parts of a model on one rank, with the bytes that each needs in a training step; rank_memory.py explains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from monoblock.accounting.activations import head_activations, input_activations
from monoblock.accounting.flops import BatchShape, iterate_inputs
from monoblock.accounting.fused_loss import fused_loss_bytes, fuses_loss, plain_loss_bytes
from monoblock.accounting.kept_activations import block_mode
from monoblock.accounting.parallel import ParallelPlan, RankParameters, narrow_block, rank_block_parameters
from monoblock.accounting.parameters import count_parameters, head_linears, norm_parameters
from monoblock.accounting.rank_activations import (
    AUTOCAST,
    SHARDED,
    Precision,
    block_bytes,
    kept_bytes,
    saved_bytes,
    working_bytes,
)
from monoblock.accounting.saved_activations import norm_activations, shared_attention_activations
from monoblock.config.model import BlockConfig, Buckets, EmbeddingConfig, ModelConfig, StackConfig
from monoblock.config.parts import VOCABULARY_HEADS, CheckpointMode


class Segment(NamedTuple):
    """A part of the model on one rank, in bytes where not said otherwise."""

    name: str
    parameters: RankParameters  # counts
    saved: int = 0  # activations from the forward to the backward pass
    copies: int = 0  # 16-bit copies of weights over the same time
    recomputed: int = 0  # activations and copies that checkpointing computes again
    tied_gradients: int = 0  # a count: gradients that appear here (or, if negative, elsewhere) because of tied weights
    working: int = 0  # gradients at the start of its backward pass, while all its activations are saved
    end_working: int = 0  # gradients and inputs at the end of its backward pass, when its activations are released
    forward_working: int = 0  # tensors that only the forward pass needs: logits, and the hidden states of the head
    cached_copies: int = 0  # copies of weights that autocast keeps through the forward pass of full checkpointing
    is_block: bool = False


# -- segments ----------------------------------------------------------------------------------------------------------


def _block_segments(
    name: str,
    stack: StackConfig,
    shape: BatchShape,
    length: int,
    tensor: int,
    precision: Precision,
    checkpointing: CheckpointMode,
) -> Iterator[Segment]:
    segments: dict[int, Segment] = {}  # of each block of the pattern, which may run thousands of times
    for number, (block, owns) in enumerate(stack.layers_with_ownership()):
        if id(block) not in segments:
            segments[id(block)] = _block_segment(block, shape, length, tensor, precision, checkpointing)
        segment = segments[id(block)]
        parameters = segment.parameters if owns else RankParameters(0, 0)
        yield segment._replace(name=f"{name} block {number}", parameters=parameters)


def _block_segment(
    block: BlockConfig,
    shape: BatchShape,
    length: int,
    tensor: int,
    precision: Precision,
    checkpointing: CheckpointMode,
) -> Segment:
    rows, copied = shape.batch * length, precision is AUTOCAST
    parameters = rank_block_parameters(block, tensor)
    saved = block_bytes(block, shape, length, tensor, precision)
    copies = 2 * parameters.matrices if copied else 0
    block_input = precision.stream * rows * block.width
    down = block.feedforward.hidden // tensor * block.width
    segment = Segment(
        "block",
        parameters,
        saved,
        copies,
        working=working_bytes(block, shape.batch, length, tensor, precision) + (4 if copied else 2) * down,
        end_working=2 * block_input + precision.norm_working(block.norm, rows * block.width),
        is_block=True,
    )
    if mode := block_mode(block, checkpointing):
        kept = kept_bytes(block, shape, length, tensor, precision, mode)
        segment = segment._replace(
            saved=kept,
            copies=0,
            recomputed=saved + copies - kept,
            cached_copies=copies if copied and mode is True else 0,
        )
    return segment


def count_outside_blocks(config: ModelConfig, tensor: int) -> dict[str, int]:
    """Count the parameters of each component outside the blocks on one rank of a tensor-parallel group."""
    counts = count_parameters(config)
    rows = {f"{name}.token": part.vocab for name, part in config.inputs.items() if isinstance(part, EmbeddingConfig)}
    if (
        config.head is not None
        and config.head.kind in VOCABULARY_HEADS
        and isinstance(config.target_input, EmbeddingConfig)
    ):
        rows["head.output"] = config.target_input.vocab
    return {  # the first ranks have whole rows of a table that cannot be divided evenly
        name: -(-rows[name] // tensor) * (count // rows[name]) if name in rows else count
        for name, count in counts.items()
        if not name.startswith(("encoder.", "decoder."))
    }


def model_segments(
    config: ModelConfig,
    shape: BatchShape,
    plan: ParallelPlan,
    *,
    checkpointing: CheckpointMode = False,
) -> list[Segment]:
    """Return the parts of a model on one rank of a tensor-parallel group, in the order of the forward pass."""
    precision, tensor = SHARDED if plan.shard > 1 else AUTOCAST, plan.tensor
    counts = count_outside_blocks(config, tensor)
    segments: list[Segment] = []
    for stack_name, stack in config.stacks.items():
        is_first = not segments
        prefix = "input" if is_first else "target"
        length = shape.source if stack_name == "encoder" else shape.target
        input_segment = _input_segment(config, shape, prefix, counts, precision)
        shared = _shared_bytes(stack, length, tensor, recomputed=bool(checkpointing))
        segments.append(input_segment._replace(saved=input_segment.saved + shared))
        segments += _block_segments(stack_name, stack, shape, length, tensor, precision, checkpointing)
        segments.append(_stack_segment(config, stack_name, stack, shape, length, tensor, precision))
    if config.head is not None:
        segments.append(_head_segment(config, shape, counts, plan, precision))
    return segments


def _input_segment(
    config: ModelConfig, shape: BatchShape, prefix: str, counts: dict[str, int], precision: Precision
) -> Segment:
    parameters = sum(count for name, count in counts.items() if name.startswith(prefix + "."))
    saved = 0
    if prefix == "input":  # the activations of both inputs, which are small
        saved = saved_bytes(input_activations(config, shape))
        for _, part, length in iterate_inputs(config, shape):
            size = part.dim or config.width if isinstance(part, EmbeddingConfig) else config.width
            saved += precision.norm_extra(part.norm, shape.batch * length * size)
    tied = tied_table(config, counts) if prefix == tied_input(config) else 0
    working = 2 * 4 * tied if precision is AUTOCAST else 0  # the gradient of the lookup, and the sum with the head's
    return Segment(prefix, RankParameters(parameters, 0), saved, tied_gradients=-tied, working=working)


def tied_input(config: ModelConfig) -> str | None:
    """Return which input has the token embedding that is also the output matrix, or None."""
    if config.tie == "output" and config.family == "encoder-decoder":
        return "target"
    return "input" if config.tie in ("output", "three_way") else None


def tied_table(config: ModelConfig, counts: dict[str, int]) -> int:
    """Count the weights of the token embedding that is also the output matrix; 0 if there is none."""
    prefix = tied_input(config)
    return 0 if prefix is None else counts[f"{prefix}.token"]


def _stack_segment(
    config: ModelConfig,
    name: str,
    stack: StackConfig,
    shape: BatchShape,
    length: int,
    tensor: int,
    precision: Precision,
) -> Segment:
    """Return the norm after a stack, and the weights that its blocks share."""
    rows = shape.batch * length
    saved = saved_bytes(norm_activations(stack.norm, rows, stack.width))
    saved += precision.norm_extra(stack.norm, rows * stack.width)
    if config.family == "encoder-decoder" and name == "encoder":
        saved += precision.stream * rows * stack.width
    parameters = norm_parameters(stack.norm, stack.width) + _shared_bias_parameters(stack)
    working = precision.norm_working(stack.norm, rows * stack.width)
    return Segment(f"{name} norm", RankParameters(parameters, 0), saved, working=working)


def _shared_bytes(stack: StackConfig, length: int, tensor: int, *, recomputed: bool) -> int:
    """Return the bytes of activations that the blocks of a stack share; they are released after the first block."""
    attentions = {narrow_block(block, tensor).attention for block in stack.layers()}
    shared = (
        shared_attention_activations(attention, stack.width, length, fused=True, recomputed=recomputed)
        for attention in attentions
    )
    return sum(map(saved_bytes, shared))


def _shared_bias_parameters(stack: StackConfig) -> int:
    """Count the weights of a shared position bias, of which each rank has those of all heads."""
    for block in stack.layers():
        positions = block.attention.positions
        if isinstance(positions, Buckets) and positions.shared:
            return positions.count * block.attention.num_unpruned_heads
    return 0


def _head_segment(
    config: ModelConfig, shape: BatchShape, counts: dict[str, int], plan: ParallelPlan, precision: Precision
) -> Segment:
    parameters = sum(count for name, count in counts.items() if name.startswith("head."))
    inner = sum(linear.num_weights for linear in head_linears(config) if linear.name != "output")
    loss = (
        fused_loss_bytes(config, shape, precision)
        if fuses_loss(config, plan)
        else plain_loss_bytes(config, shape, plan.tensor, precision)
    )
    return Segment(
        "loss",
        RankParameters(parameters, 0),
        saved_bytes(head_activations(config, shape, with_logits=False)) + loss.saved,
        (2 * inner if precision is AUTOCAST else 0) + loss.copies,
        tied_gradients=tied_table(config, counts),
        working=loss.backward,
        end_working=loss.end,
        forward_working=loss.forward + precision.stream * shape.batch * shape.target * config.width,
    )


# -- pipeline stages --------------------------------------------------------------------------------------------------


def split_stages(segments: list[Segment], pipeline: int) -> list[list[Segment]]:
    """Divide segments into pipeline stages: blocks evenly, the input to the first, norm and head to the last stage."""
    if pipeline == 1:
        return [segments]
    blocks = [segment for segment in segments if segment.is_block]
    first = segments[: segments.index(blocks[0])]
    last = segments[segments.index(blocks[-1]) + 1 :]
    size, rest = divmod(len(blocks), pipeline)
    stages, start = [], 0
    for number in range(pipeline):
        count = size + (number < rest)
        stages.append(blocks[start : start + count])
        start += count
    return [first + stages[0], *stages[1:-1], stages[-1] + last]
