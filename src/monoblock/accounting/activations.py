"""The activations that a forward pass saves for the backward pass, in formulas that can be checked by hand.

The table lists what is saved for each token, in elements of the computing dtype. Sizes are named as in parameters.py,
and S is the number of keys:

    norm                     D for each tensor that it saves (NORM_ROWS)
    self-attention           D + H·K + G·K + G·Kv + H·Kv: its input, queries, keys, values, the input of the last matrix
      QK norm, clip          what they read once more: H·K + G·K; with clip also G·Kv; norms of each head twice
      plain                  H·S attention weights, twice with dropout; counted separately as `attention_elements`
      fused                  no weights; H·Kv once more with positions inside attention
      softcap, sinks         no fused kernel: weights also where fused, twice with a mask or dropout, once more with a
                             softcap; keys and values are repeated to H heads
      linear                 an estimate: as fused attention
    cross-attention          the same; keys and values are for each source token, and the encoder output is saved once
    feed-forward             D + n·F: its input, and n tensors of the hidden size: those of the activation
                             (ACTIVATION_ROWS) and the input of the last matrix; gated two more; clamped two more
      experts                the same for each expert of the token, 2·D for its output, and D + E for the router
    dropout, layer scale     one byte for every element; its input, D
    head                     the input of each matrix, the logits, and their log-softmax in fp32 for the loss; a head
                             that reads the first or the last vector saves those of all positions

A bias on the scores has H·T·S elements whatever the batch size, once for each kind of block, 4 bytes an element more
for blocks that are recomputed, and 8 bytes a pair for the bucket indices of a learned bias. Attention and feed-forward
in parallel read one tensor, which is counted once.

With checkpointing only the input of each block is kept, with selective checkpointing also the outputs of its matrices
and of a fused attention kernel; plus the other activations of the largest block while it is recomputed.

Not counted, because they are below a few percent: statistics of norms, the log-sum-exp of fused attention, rotary
angles, masks, token ids, and workspaces. tests/accounting/test_memory.py compares the formulas with what autograd saves
for kernels that save no more than they need, within 10 %. On a CPU, rms_norm, dropout and attention save more, and
banded attention saves less.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

from monoblock.accounting.flops import BatchShape, iterate_inputs
from monoblock.accounting.parameters import (
    attention_linears,
    count_blocks,
    count_norms,
    feedforward_linears,
    head_linears,
    patch_linear,
    projection_linear,
)
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    FramesConfig,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
)
from monoblock.config.parts import ACTIVATION_ROWS, SEQUENCE_HEADS, CheckpointMode
from monoblock.errors import ConfigError

FLEX_FROM = 128  # a GPU computes windows with FlexAttention from this many tokens on, as in nn/sparse_attention.py
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = (False, "selective", True)  # from most to least memory


@dataclass(frozen=True)
class SavedActivations:
    """The size of saved activations.

    `elements` and `attention_elements` (attention weights) are in the computing dtype; `raw_bytes` counts tensors of
    other dtypes, such as masks of dropout.
    """

    elements: int = 0
    attention_elements: int = 0
    raw_bytes: int = 0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, factor: int) -> SavedActivations:
        return SavedActivations(*(factor * count for count in astuple(self)))


NOTHING = SavedActivations()


def norm_elements(norm: NormConfig | None, elements: int) -> int:
    return norm.row.tensors * elements if norm is not None else 0


# -- attention ---------------------------------------------------------------------------------------------------------


def has_fused_kernel(attention: AttentionConfig) -> bool:
    return attention.softcap is None and not attention.sinks


def recomputes_scores(attention: AttentionConfig, length: int) -> bool:
    """Return whether selective checkpointing recomputes self-attention: it cannot keep the output of FlexAttention."""
    is_flex = (attention.window or length) < length >= FLEX_FROM and not attention.has_score_bias
    return is_flex or not has_fused_kernel(attention)


def attention_activations(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool = False
) -> SavedActivations:
    """Count the activations that attention saves, from its normalized input to the input of its output matrix."""
    query, key, value, output = attention_linears(attention, width)
    has_kernel, matrix = has_fused_kernel(attention), batch * attention.heads * queries * keys
    q, k, v = queries * query.outputs, keys * key.outputs, keys * value.outputs
    copies = 1 if has_kernel else attention.heads // attention.num_kv_heads
    elements = queries * (width + output.inputs) + q + copies * (k + v)
    if attention.qk_norm is not None:
        elements += norm_elements(attention.qk_norm, (q + k) * (2 if attention.qk_norm_over == "each_head" else 1))
    if attention.clip is not None:
        elements += q + k + v
    if fused and has_kernel:
        elements += queries * output.inputs if attention.positions is not None else 0
        return SavedActivations(batch * elements)
    drops = attention.dropout > 0
    is_masked = not has_kernel and (attention.mask != "full" or (attention.window or queries) < queries)
    matrices = 1 + (attention.softcap is not None) + (drops or is_masked)
    return SavedActivations(batch * elements, matrices * matrix, matrix if drops else 0)


def bias_activations(attention: AttentionConfig, length: int, *, fused: bool, recomputed: bool) -> SavedActivations:
    """Count the elements of the bias that positions add to the scores, which a fused kernel reads as a matrix.

    Blocks that are recomputed need it in fp32, too.
    """
    if not attention.has_score_bias:
        return NOTHING
    is_learned = any(attention.table_rows(shared=shared) for shared in (False, True))
    scores, indices = attention.heads * length**2, 8 * length**2 if is_learned else 0
    matrix = scores if fused and has_fused_kernel(attention) else 0
    return SavedActivations(attention_elements=matrix, raw_bytes=indices + (4 * scores if recomputed else 0))


# -- a block -----------------------------------------------------------------------------------------------------------


def feedforward_activations(feedforward: FeedForwardConfig, width: int, rows: int) -> SavedActivations:
    if not feedforward.hidden:
        return NOTHING
    _, tensors, saves_output, _ = ACTIVATION_ROWS[feedforward.activation]
    drops, experts = feedforward.dropout > 0, feedforward.experts
    if feedforward.gated:
        tensors += 3 + (2 if feedforward.clamp is not None else 0)
    else:
        tensors += 1 + (saves_output and drops)
    routed = rows * experts.top_k if experts else rows
    elements = routed * (width + tensors * feedforward.hidden)
    if experts:
        elements += routed * 2 * width + rows * (width + experts.count)
    return SavedActivations(elements, raw_bytes=routed * feedforward.hidden if drops else 0)


def block_activations(block: BlockConfig, shape: BatchShape, length: int, *, fused: bool = False) -> SavedActivations:
    """Count the activations that one block saves for `length` tokens of each sequence.

    Cross-attention reads `shape.source` tokens.
    """
    rows, width, sublayers = shape.batch * length, block.width, len(block.sublayers)
    elements = norm_elements(block.norm, count_norms(block) * rows * width)
    elements -= rows * width if block.is_parallel else 0  # both branches read one tensor
    elements += sublayers * rows * width if block.layer_scale is not None else 0
    saved = SavedActivations(elements, raw_bytes=sublayers * rows * width if block.dropout > 0 else 0)
    saved += attention_activations(block.attention, width, shape.batch, length, length, fused=fused)
    if block.cross:
        saved += attention_activations(block.cross, width, shape.batch, length, shape.source, fused=fused)
    return saved + feedforward_activations(block.feedforward, width, rows)


def block_mode(block: BlockConfig, checkpointing: CheckpointMode) -> CheckpointMode:
    """Return how a block is recomputed: with batch norms entirely or not at all."""
    if checkpointing not in CHECKPOINT_MODES:
        raise ConfigError(f"checkpointing={checkpointing!r} is not one of {', '.join(map(repr, CHECKPOINT_MODES))}")
    norms = [block.norm, *(a.qk_norm for a in (block.attention, block.cross) if a is not None)]
    has_statistics = any(norm is not None and norm.row.has_running_statistics for norm in norms)
    return bool(checkpointing) if has_statistics else checkpointing


def kept_activations(
    block: BlockConfig, shape: BatchShape, length: int, *, checkpointing: CheckpointMode, fused: bool = False
) -> SavedActivations:
    """Count the activations of a block that exist from the forward to the backward pass."""
    mode, width, feedforward = block_mode(block, checkpointing), block.width, block.feedforward
    if not mode:
        return block_activations(block, shape, length, fused=fused)
    elements = length * width  # of one sequence: the input of the block
    if mode == "selective":
        for attention, keys in ((block.attention, length), (block.cross, shape.source)):
            if attention is not None:
                query, key, value, output = attention_linears(attention, width)
                elements += length * (query.outputs + output.outputs) + keys * (key.outputs + value.outputs)
                is_kept = fused and not recomputes_scores(attention, length)
                elements += length * output.inputs if is_kept else 0
        copies = feedforward.experts.top_k if feedforward.experts else 1
        elements += length * copies * sum(linear.outputs for linear in feedforward_linears(feedforward, width))
        elements += length * feedforward.experts.count if feedforward.experts else 0
    return SavedActivations(shape.batch * elements)


# -- a whole model -----------------------------------------------------------------------------------------------------


def outside_activations(config: ModelConfig, shape: BatchShape, *, fused: bool, recomputed: bool) -> SavedActivations:
    """Count the activations of inputs, norms after the blocks, biases on scores, and the encoder output."""
    elements = raw_bytes = 0
    for _, part, length in iterate_inputs(config, shape):
        rows, size = shape.batch * length, config.width
        if isinstance(part, PatchConfig):
            elements += shape.batch * (length - part.num_prefix_tokens) * patch_linear(part, size).inputs
        elif isinstance(part, FramesConfig):  # two frames a position: both convolutions and both activations
            elements += rows * (2 * part.channels + 5 * size)
        elif projection := projection_linear(part, size):
            elements += rows * projection.inputs
            size = projection.inputs if part.projection == "last" else size
        elements += norm_elements(part.norm, rows * size)
        raw_bytes += rows * size if part.dropout > 0 else 0
    saved = SavedActivations(elements, raw_bytes=raw_bytes)
    for name, stack in config.stacks.items():
        length = shape.length(name)
        saved += SavedActivations(norm_elements(stack.norm, shape.batch * length * stack.width))
        counts = {block.attention: times for block, times in count_blocks(stack).items()}
        for attention, times in counts.items():
            times = times if attention.table_rows(shared=False) else 1
            saved += bias_activations(attention, length, fused=fused, recomputed=recomputed) * times
    if config.family == "encoder-decoder":
        saved += SavedActivations(shape.batch * shape.source * config.width)
    return saved


def head_activations(config: ModelConfig, shape: BatchShape, *, with_logits: bool = True) -> SavedActivations:
    """Count the activations that the head saves, `with_logits` also the logits and their log-softmax for the loss."""
    head, elements, raw_bytes = config.head, 0, 0
    if head is None:
        return NOTHING
    for linear in head_linears(config):
        rows = shape.batch * (shape.target if linear.applied_to == "tokens" else 1)
        elements += rows * linear.inputs
        if linear.name == "output" and head.kind != "pooled":
            logits = rows * linear.outputs
            elements += norm_elements(head.norm, rows * linear.inputs)
            elements += logits * (with_logits + (head.softcap is not None))
            raw_bytes += 4 * logits * with_logits + (rows * linear.inputs if head.dropout > 0 else 0)
        elif linear.name == "transform" and head.transform:
            elements += ACTIVATION_ROWS[head.transform].tensors * rows * linear.outputs
    if head.kind in SEQUENCE_HEADS and head.pooling != "mean":
        elements += shape.batch * shape.target * config.width
    return SavedActivations(elements, raw_bytes=raw_bytes)


def model_activations(
    config: ModelConfig, shape: BatchShape, *, fused: bool = False, checkpointing: CheckpointMode = False
) -> SavedActivations:
    """Count the activations that are saved at the end of the forward pass.

    With checkpointing, count those at the peak of the backward pass: `recomputed` is the rest of a block.  `fused`
    attention kernels save no attention weights.
    """
    saved = outside_activations(config, shape, fused=fused, recomputed=bool(checkpointing))
    saved += head_activations(config, shape)
    recomputed = []
    for name, stack in config.stacks.items():
        length = shape.length(name)
        for block, times in count_blocks(stack).items():
            kept = kept_activations(block, shape, length, checkpointing=checkpointing, fused=fused)
            saved += kept * times
            recomputed.append(block_activations(block, shape, length, fused=fused) + kept * -1)
    return saved + max(recomputed, key=lambda rest: rest.elements + rest.attention_elements)


def lstm_activations(config: RecurrentConfig, shape: BatchShape) -> SavedActivations:
    """Count the activations that an LSTM model saves.

    Every layer saves for each token its input, four gates, the cell and the tanh of the cell; additive attention saves
    a vector for each pair of positions.
    """
    width, rows, source_rows = config.width, shape.batch * shape.target, shape.batch * shape.source
    elements, pairs = rows * (config.depth * 7 + 1) * width, 0
    if config.kind == "encoder_decoder":
        pairs = rows * shape.source if config.attention else 0
        elements += source_rows * (2 * config.depth * 7 + 3) * width + (6 * rows + pairs) * width
    logits = rows * (config.target_vocab or config.vocab)
    return SavedActivations(elements + logits, attention_elements=pairs, raw_bytes=4 * logits)
