"""The parts of a model on one rank, with the bytes that each needs in a training step; rank_memory.py explains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from monoblock.accounting.activations import block_activations, head_activations, input_activations
from monoblock.accounting.flops import BatchShape, iterate_inputs
from monoblock.accounting.memory import activation_bytes
from monoblock.accounting.parallel import (
    RankParameters,
    narrow_block,
    rank_block_parameters,
    replicated_kv_heads,
)
from monoblock.accounting.parameters import count_norms, count_parameters, head_linears, norm_parameters
from monoblock.accounting.saved_activations import SavedActivations, norm_activations, shared_attention_activations
from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ModelConfig,
    NormConfig,
    Rotary,
    StackConfig,
)
from monoblock.config.parts import VOCABULARY_HEADS

FUSE_MIN_TOKENS = 512  # from this many tokens on, queries, keys and values are one matrix product, as in nn/linear.py


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
    forward_working: int = 0  # tensors that only the forward pass needs
    cached_copies: int = 0  # copies of weights that autocast keeps to the end of the forward pass, if recomputed
    is_block: bool = False


# -- activations of a part ---------------------------------------------------------------------------------------------


class Precision(NamedTuple):
    """The bytes of an element of the residual stream, and of the input of a norm by the kind of norm."""

    stream: int
    layer_norm: int
    rms_norm: int

    def norm_extra(self, norm: NormConfig | None, elements: int) -> int:
        """Return the bytes that a norm saves for its input beyond two an element."""
        if norm is None or norm.kind == "none":
            return 0
        return elements * ((self.rms_norm if norm.kind == "rms" else self.layer_norm) - 2)

    def norm_working(self, norm: NormConfig | None, elements: int) -> int:
        """Return the bytes that the backward pass of a norm needs: an RMS norm of 16-bit input is computed in fp32."""
        return RMS_WORKING_BYTES * elements if norm is not None and norm.kind == "rms" and self.rms_norm == 6 else 0


RMS_WORKING_BYTES = 28  # for each element: seven fp32 tensors
AUTOCAST = Precision(stream=4, layer_norm=4, rms_norm=4)
SHARDED = Precision(stream=2, layer_norm=4, rms_norm=6)


def _bytes(saved: SavedActivations) -> int:
    return sum(activation_bytes(saved, "bf16"))


def _extra_attention_bytes(attention: AttentionConfig, width: int, queries: int, keys: int, batch: int) -> int:
    """Return the bytes that attention saves in 16 bits beyond those of `attention_activations`.

    Rotated queries and keys are copies, but the values keep the storage of the whole product in memory. A bias on the
    scores is converted for each block.
    """
    extra, size = 0, attention.key_size(width)
    if isinstance(attention.positions, Rotary) and batch * queries >= FUSE_MIN_TOKENS:
        extra += batch * (queries * attention.heads + keys * attention.num_kv_heads) * size
    if isinstance(attention.positions, Alibi | Buckets):
        extra += attention.heads * queries * keys
    return 2 * extra


def block_bytes(block: BlockConfig, shape: BatchShape, length: int, tensor: int, precision: Precision) -> int:
    """Return the bytes of the activations that a block saves on one rank of a tensor-parallel group."""
    narrow, rows, width = narrow_block(block, tensor), shape.batch * length, block.width
    saved = _bytes(block_activations(narrow, shape, length, fused=True))
    saved += precision.norm_extra(block.norm, count_norms(block) * rows * width)
    saved += _extra_attention_bytes(narrow.attention, width, length, length, shape.batch)
    if block.is_parallel:
        saved += 2 * rows * width  # each branch converts the input
    if block.cross:
        saved += 2 * 2 * shape.batch * shape.source * width  # keys and values convert the encoder output
    for attention, keys in ((block.attention, length), (block.cross, shape.source)):
        if attention is not None:
            sizes = attention.key_size(width) + attention.value_size(width)
            saved += 2 * shape.batch * keys * replicated_kv_heads(attention, tensor) * sizes
    return saved


def _working_bytes(block: BlockConfig, rows: int, tensor: int, precision: Precision) -> int:
    """Estimate the gradients of activations at the start of the backward pass of a block.

    These are those of the hidden features of the feed-forward network, and of the residual stream.
    """
    experts = block.feedforward.experts
    hidden = rows * (experts.top_k if experts else 1) * block.feedforward.hidden // tensor
    return 2 * hidden * (3 if block.feedforward.gated else 2) + precision.stream * rows * block.width


# -- segments ----------------------------------------------------------------------------------------------------------


def _block_segments(
    name: str,
    stack: StackConfig,
    shape: BatchShape,
    length: int,
    tensor: int,
    precision: Precision,
    checkpointing: bool,
) -> Iterator[Segment]:
    rows = shape.batch * length
    copied = precision is AUTOCAST
    for number, (block, owns) in enumerate(stack.layers_with_ownership()):
        parameters = rank_block_parameters(block, tensor)
        joined = _joined_weights(block, rows, tensor) if precision is AUTOCAST else 0
        saved = block_bytes(block, shape, length, tensor, precision)
        copies = 2 * (parameters.matrices if copied else joined)
        block_input = precision.stream * rows * block.width
        down = block.feedforward.hidden // tensor * block.width
        segment = Segment(
            f"{name} block {number}",
            parameters if owns else RankParameters(0, 0),
            saved,
            copies,
            working=_working_bytes(block, rows, tensor, precision) + (4 if copied else 2) * down,
            end_working=2 * block_input + precision.norm_working(block.norm, rows * block.width),
            is_block=True,
        )
        if checkpointing:
            segment = segment._replace(
                saved=block_input,
                copies=0,
                recomputed=saved + copies - block_input,
                cached_copies=copies - 2 * joined if copied else 0,
            )
        yield segment


def _joined_weights(block: BlockConfig, rows: int, tensor: int) -> int:
    """Count the weights that are joined into one matrix before they are converted, which autocast does not cache."""
    if rows < FUSE_MIN_TOKENS:
        return 0
    narrow = narrow_block(block, tensor)
    attention, width = narrow.attention, block.width
    qkv = (attention.heads + attention.num_kv_heads) * attention.key_size(width)
    joined = width * (qkv + attention.num_kv_heads * attention.value_size(width))
    if block.feedforward.gated and block.feedforward.experts is None:
        joined += 2 * width * narrow.feedforward.hidden
    return joined


def count_outside_blocks(config: ModelConfig, tensor: int) -> dict[str, int]:
    """Count the parameters of each component outside the blocks on one rank of a tensor-parallel group."""
    counts = count_parameters(config)
    split = {"input.token", "target.token", "head.bias"}
    if config.head is not None and config.head.kind in VOCABULARY_HEADS:
        split.add("head.output")
    return {
        name: -(-count // tensor) if name in split else count
        for name, count in counts.items()
        if not name.startswith(("encoder.", "decoder."))
    }


def model_segments(
    config: ModelConfig, shape: BatchShape, *, tensor: int = 1, sharded: bool = False, checkpointing: bool = False
) -> list[Segment]:
    """Return the parts of a model on one rank of a tensor-parallel group, in the order of the forward pass."""
    precision = SHARDED if sharded else AUTOCAST
    counts = count_outside_blocks(config, tensor)
    segments: list[Segment] = []
    for stack_name, stack in config.stacks.items():
        is_first = not segments
        prefix = "input" if is_first else "target"
        segments.append(_input_segment(config, shape, prefix, counts, precision))
        length = shape.source if stack_name == "encoder" else shape.target
        segments += _block_segments(stack_name, stack, shape, length, tensor, precision, checkpointing)
        segments.append(_stack_segment(config, stack_name, stack, shape, length, tensor, precision))
    if config.head is not None:
        segments.append(_head_segment(config, shape, counts, tensor, precision))
    return segments


def _input_segment(
    config: ModelConfig, shape: BatchShape, prefix: str, counts: dict[str, int], precision: Precision
) -> Segment:
    parameters = sum(count for name, count in counts.items() if name.startswith(prefix + "."))
    saved = 0
    if prefix == "input":  # the activations of both inputs, which are small
        saved = _bytes(input_activations(config, shape))
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
    """Return the norm after a stack, and what its blocks share."""
    rows = shape.batch * length
    saved = _bytes(norm_activations(stack.norm, rows, stack.width))
    saved += precision.norm_extra(stack.norm, rows * stack.width)
    blocks = {narrow_block(block, tensor) for block in stack.layers()}
    for attention in {block.attention for block in blocks}:
        saved += _bytes(shared_attention_activations(attention, stack.width, length, fused=True))
    if config.family == "encoder-decoder" and name == "encoder":
        saved += precision.stream * rows * stack.width
    parameters = norm_parameters(stack.norm, stack.width) + _shared_bias_parameters(stack, tensor)
    working = precision.norm_working(stack.norm, rows * stack.width)
    return Segment(f"{name} norm", RankParameters(parameters, 0), saved, working=working)


def _shared_bias_parameters(stack: StackConfig, tensor: int) -> int:
    for block in stack.layers():
        positions = block.attention.positions
        if isinstance(positions, Buckets) and positions.shared:
            return positions.count * block.attention.num_unpruned_heads // tensor
    return 0


def _head_segment(
    config: ModelConfig, shape: BatchShape, counts: dict[str, int], tensor: int, precision: Precision
) -> Segment:
    assert config.head is not None
    parameters = sum(count for name, count in counts.items() if name.startswith("head."))
    linears, logits = head_linears(config), _logit_count(config, shape)
    kept = head_activations(config, shape)
    saved = _bytes(kept._replace(elements=kept.elements - logits, fp32_elements=kept.fp32_elements - logits))
    matrices = sum(linear.num_weights // (tensor if linear.name == "output" else 1) for linear in linears)
    local = -(-logits // tensor)
    return Segment(
        "loss",
        RankParameters(parameters, 0),
        saved + 4 * local,
        2 * matrices if precision is AUTOCAST else 0,
        tied_gradients=tied_table(config, counts),
        working=8 * local,
        forward_working=6 * local,
    )


def _logit_count(config: ModelConfig, shape: BatchShape) -> int:
    """Count the logits of a batch; a pooled head has none."""
    if config.head is None or config.head.kind == "pooled":
        return 0
    output = next(linear for linear in head_linears(config) if linear.name == "output")
    return shape.batch * (shape.target if output.applied_to == "tokens" else 1) * output.outputs


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
