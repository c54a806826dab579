"""The activations that a forward pass saves for the backward pass.

The table lists what is saved for each token, in elements of the computing dtype (statistics of norms and of the fused
softmax are fp32). Sizes are named as in parameters.py, and S is the number of keys:

    norm                     its input, D, and its statistics: 2 (layer) or 1 (rms); batch: 2·D for the whole batch
    self-attention           its input, D, queries H·K, keys G·K, values G·Kv, and the input of the output matrix, H·Kv
      plain                  the attention weights, H·S for each token, counted separately as `attention_elements`
      fused                  instead the log-sum-exp, one element a head; H·Kv once more with rotary positions, or if
                             queries that see no key are zeroed
      softcap, sinks         no fused kernel: the plain path always runs, with keys and values repeated to H heads, the
                             masked weights, the capped scores, and two masks of one byte an element
      linear                 an estimate: as fused attention
    cross-attention          the same; keys and values are per source token, and the encoder output is saved once
    feed-forward             its input, D, the tensors of the activation (ACTIVATION_ROWS), and the input of the last
                             matrix, F
      gated                  also up and the activated gate
      experts                the same for each expert of the token, its output twice, and the router scores
    dropout                  one byte for every element; on attention weights also the weights after dropout
    QK norm, clip, layer scale     their input
    head                     the input of each matrix, the logits, and their log-softmax in fp32 for the loss; pooling
                             the first or last vector saves the vectors of all positions

Some tensors have an element for each pair of positions, whatever the batch size: a bias on the scores, saved once for
each kind of block (a learned bias takes 8 more bytes a pair for bucket indices), and a mask other than full or causal,
saved once for each block, because the kernel converts it to floats. With 128 tokens or more FlexAttention is used,
which saves no mask.

Parallel attention and feed-forward read the same tensor, which is counted once. With checkpointing only the input of
each block is kept, with selective checkpointing also the outputs of its matrices (also of each expert and the router)
and of a fused attention kernel, with its log-sum-exp; plus the other activations of the largest block while it is
recomputed. Selective checkpointing recomputes attention without such a kernel, and FlexAttention, which is compiled, so
that checkpointing does not see it. A block with batch norms is recomputed entirely or not at all. Workspaces,
fragmentation, token ids and the mask of the tiles of banded attention are not counted.

This is exact in fp32 for kernels that save no more than they need. CPU kernels save more: rms_norm its normalized
elements, dropout four bytes an element, and attention all weights if they have dropout or a learned bias; FlexAttention
is for GPUs only. GPU kernels in fp32 do not support grouped heads (G < H), for which torch saves all attention
weights. In 16 bits the scores of the plain path, the elements inside rms_norm and the residual stream under autocast
are still fp32.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Literal

from monoblock.accounting.flops import BatchShape, count_attention_pairs, iterate_inputs
from monoblock.accounting.parameters import (
    attention_linears,
    count_blocks,
    count_norms,
    feedforward_linears,
    head_linears,
    patch_linear,
    projection_linear,
    router_linear,
)
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
    Rotary,
)
from monoblock.config.parts import ACTIVATION_ROWS, SEQUENCE_HEADS, CheckpointMode
from monoblock.errors import ConfigError

AttentionKernel = Literal["plain", "banded", "flex", "fused"]
FLEX_FROM = 128  # FlexAttention is used from this many queries on, as in nn/sparse_attention.py
BANDED_FROM, TILE = 512, 64  # banded attention is used from this many queries on, in such tiles


@dataclass(frozen=True)
class SavedActivations:
    """The size of saved activations.

    `elements` and `attention_elements` (attention weights) are in the computing dtype; `raw_bytes` counts tensors of
    other dtypes, such as masks and indices.
    """

    elements: int = 0
    attention_elements: int = 0
    fp32_elements: int = 0
    raw_bytes: int = 0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, factor: int) -> SavedActivations:
        return SavedActivations(*(factor * count for count in astuple(self)))


NOTHING = SavedActivations()


def norm_activations(norm: NormConfig | None, rows: int, size: int) -> SavedActivations:
    if norm is None or not norm.row.saves_input:
        return NOTHING
    offset = size if norm.unit_offset and norm.affine != "none" else 0  # 1 + weight
    statistics = norm.row.row_statistics * rows + norm.row.feature_statistics * size
    return SavedActivations(rows * size + offset, fp32_elements=statistics)


# -- attention ---------------------------------------------------------------------------------------------------------


def needs_plain_attention(attention: AttentionConfig) -> bool:
    """Return whether no fused kernel supports this attention; without banded attention, weights are then computed."""
    return attention.softcap is not None or attention.sinks


def _has_mask_pattern(attention: AttentionConfig, length: int) -> bool:
    """Return whether the mask over `length` tokens is neither full nor causal."""
    is_windowed = attention.window is not None and (length > attention.window or attention.sees_beyond_window)
    return is_windowed or attention.mask == "prefix"


def _supports_flex(attention: AttentionConfig, width: int, queries: int) -> bool:
    has_kernel = attention.dropout == 0.0 and attention.key_size(width) == attention.value_size(width)
    return has_kernel and not needs_plain_attention(attention) and queries >= FLEX_FROM


def is_sparse(attention: AttentionConfig, length: int) -> bool:
    """Return whether the tiles of a window, global tokens and random blocks cover at most half of the matrix."""
    if attention.window is None or length < BANDED_FROM:
        return False
    sides = 2 if attention.mask == "full" else 1
    tiles = TILE * (1 + sides * attention.global_tokens)
    blocks = attention.random_blocks * max(TILE, attention.block_size) * sides // 2
    return 2 * (count_attention_pairs(attention, length) + (tiles + blocks) * length) <= length**2


def _is_banded(attention: AttentionConfig, width: int, queries: int) -> bool:
    """Return whether banded attention computes this sparse mask, because FlexAttention does not support it."""
    if attention.has_score_bias or _supports_flex(attention, width, queries):
        return False
    return is_sparse(attention, queries)


def _has_kernel_mask(attention: AttentionConfig, width: int, queries: int) -> bool:
    """Return whether the fused kernel is passed a mask; the output of queries that see no key is then set to zero."""
    if attention.has_score_bias:
        return attention.mask != "full" or _has_mask_pattern(attention, queries)
    has_sparse_kernel = _supports_flex(attention, width, queries) or _is_banded(attention, width, queries)
    return _has_mask_pattern(attention, queries) and not has_sparse_kernel


def choose_kernel(attention: AttentionConfig, width: int, queries: int, keys: int, *, fused: bool) -> AttentionKernel:
    """Return what computes attention; "plain" computes all attention weights."""
    is_self_attention = queries == keys
    if fused and is_self_attention and _is_banded(attention, width, queries):
        return "banded"
    if not fused or needs_plain_attention(attention):
        return "plain"
    has_pattern = is_self_attention and _has_mask_pattern(attention, queries) and not attention.has_score_bias
    return "flex" if has_pattern and _supports_flex(attention, width, queries) else "fused"


def count_scores(attention: AttentionConfig, queries: int, keys: int) -> int:
    """Count the attention scores of one sequence."""
    return attention.heads * queries * keys


def attention_activations(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool = False
) -> SavedActivations:
    """Count the activations that attention saves, from its normalized input to the input of its output matrix."""
    query, key, value, output = attention_linears(attention, width)
    is_banded = choose_kernel(attention, width, queries, keys, fused=fused) == "banded"
    is_plain = needs_plain_attention(attention) and not is_banded
    copies = attention.heads // attention.num_kv_heads if is_plain else 1
    keys_and_values = keys * (key.outputs + value.outputs)
    saved = SavedActivations(batch * (queries * (width + query.outputs + output.inputs) + copies * keys_and_values))
    saved += _qk_norm_activations(attention, batch * queries, query.outputs, attention.heads)
    saved += _qk_norm_activations(attention, batch * keys, key.outputs, attention.num_kv_heads)
    if attention.clip is not None:
        saved += SavedActivations(batch * (queries * query.outputs + keys_and_values))
    if is_plain:
        return saved + _plain_attention_activations(attention, batch, queries, keys)
    if is_banded:
        return saved + SavedActivations(fp32_elements=batch * attention.heads * queries)
    if fused:
        copies_output = isinstance(attention.positions, Rotary) or _has_kernel_mask(attention, width, queries)
        outputs = batch * queries * output.inputs if copies_output else 0
        saved += SavedActivations(outputs, fp32_elements=batch * attention.heads * queries)
        return saved + _fused_attention_activations(attention, width, queries, keys)
    matrix = batch * count_scores(attention, queries, keys)
    return saved + SavedActivations(attention_elements=matrix) + _dropout_activations(attention, matrix)


def _dropout_activations(attention: AttentionConfig, elements: int) -> SavedActivations:
    if attention.dropout == 0:
        return NOTHING
    return SavedActivations(attention_elements=elements, raw_bytes=elements)


def _qk_norm_activations(attention: AttentionConfig, rows: int, size: int, heads: int) -> SavedActivations:
    if attention.qk_norm is None:
        return NOTHING
    if attention.qk_norm_over == "width":
        return norm_activations(attention.qk_norm, rows, size)
    scaled = rows * size if attention.qk_norm_over == "each_head" else 0  # normalized first, then scaled by head
    return norm_activations(attention.qk_norm, rows * heads, size // heads) + SavedActivations(scaled)


def _plain_attention_activations(attention: AttentionConfig, batch: int, queries: int, keys: int) -> SavedActivations:
    """Count what attention without a fused kernel saves.

    These are the softmax, the weights after mask or dropout, the capped scores, and masks.
    """
    matrix = batch * count_scores(attention, queries, keys)
    masked = attention.mask != "full" or _has_mask_pattern(attention, queries)
    copies = 1 + (attention.softcap is not None) + (masked or attention.dropout > 0)
    return SavedActivations(
        attention_elements=copies * matrix + (batch * attention.heads * queries if attention.sinks else 0),
        raw_bytes=(2 * queries * keys if masked else 0) + (matrix if attention.dropout > 0 else 0),
    )


def _fused_attention_activations(attention: AttentionConfig, width: int, queries: int, keys: int) -> SavedActivations:
    """Count the mask or bias that a block saves for the fused kernel and does not share with other blocks."""
    if attention.table_rows(shared=False):
        return _bias_activations(attention, queries, keys, fused=True)
    has_own_mask = not attention.has_score_bias and _has_kernel_mask(attention, width, queries)
    return SavedActivations(attention_elements=queries * keys if has_own_mask else 0)


def _bias_activations(attention: AttentionConfig, queries: int, keys: int, *, fused: bool) -> SavedActivations:
    """Count the elements of a bias, which a fused kernel takes together with the mask.

    A learned bias also saves bucket indices and the mask.
    """
    matrix = count_scores(attention, queries, keys) if fused else 0
    if not any(attention.table_rows(shared=shared) for shared in (False, True)):
        return SavedActivations(attention_elements=matrix)
    masked = fused and attention.mask != "full"
    return SavedActivations(attention_elements=matrix, raw_bytes=(8 + masked) * queries * keys)


def shared_attention_activations(
    attention: AttentionConfig, width: int, length: int, *, fused: bool, recomputed: bool = False
) -> SavedActivations:
    """Count what blocks with the same attention share: rotary angles, a bias, and a mask of queries that see no key.

    Blocks that are recomputed also need the bias before it is converted for a kernel, in fp32.
    """
    saved, positions = [], attention.positions
    fused = fused and not needs_plain_attention(attention)
    if isinstance(positions, Rotary):
        size = attention.key_size(width)
        is_proportional = positions.scaling is not None and positions.scaling.kind == "proportional"
        rotated = size if positions.dim is None or is_proportional else positions.dim
        saved.append(SavedActivations(2 * length * (rotated // 2)))
    elif attention.has_score_bias and not attention.table_rows(shared=False):
        saved.append(_bias_activations(attention, length, length, fused=fused))
        saved.append(SavedActivations(fp32_elements=count_scores(attention, length, length) if recomputed else 0))
    if fused and _has_kernel_mask(attention, width, length):
        saved.append(SavedActivations(raw_bytes=length))
    return sum(saved, NOTHING)


CHECKPOINT_MODES: tuple[CheckpointMode, ...] = (False, "selective", True)  # from most to least memory

# -- a block -----------------------------------------------------------------------------------------------------------


def feedforward_activations(feedforward: FeedForwardConfig, width: int, rows: int) -> SavedActivations:
    if not feedforward.hidden:
        return NOTHING
    experts = feedforward.experts
    routed_rows = rows * experts.top_k if experts else rows
    saved = SavedActivations(
        routed_rows * (width + _count_hidden_tensors(feedforward) * feedforward.hidden),
        raw_bytes=routed_rows * feedforward.hidden if feedforward.dropout > 0 else 0,
    )
    if experts is None:
        return saved
    scores = {
        "softmax_renormalized": experts.count + experts.top_k + 1,
        "softmax": experts.count,
        "top_k_softmax": experts.top_k,
    }
    # The input and scores of the router; of each expert its output, weight and their product, and three int64 indices.
    router = SavedActivations(
        rows * (width + scores[experts.router]) + routed_rows * (2 * width + 1), raw_bytes=24 * routed_rows
    )
    return saved + router


def _count_hidden_tensors(feedforward: FeedForwardConfig) -> int:
    """Count the tensors of size F (`feedforward.hidden`) that are saved for each token."""
    tensors, saves_output, _ = ACTIVATION_ROWS[feedforward.activation]
    if feedforward.gated:
        return tensors + 3 + (2 if feedforward.clamp is not None else 0)
    return tensors + 1 + (saves_output and feedforward.dropout > 0)


def block_activations(block: BlockConfig, shape: BatchShape, length: int, *, fused: bool = False) -> SavedActivations:
    """Count the activations that one block saves for `length` tokens of each sequence.

    Cross-attention reads `shape.source` tokens.
    """
    rows, width = shape.batch * length, block.width
    saved = [
        norm_activations(block.norm, rows, width) * count_norms(block),
        attention_activations(block.attention, width, shape.batch, length, length, fused=fused),
        feedforward_activations(block.feedforward, width, rows),
    ]
    if block.cross:
        saved.append(attention_activations(block.cross, width, shape.batch, length, shape.source, fused=fused))
    sublayers = len(block.sublayers)
    if block.is_parallel:
        saved.append(SavedActivations(-rows * width))  # both branches read one tensor
    if block.layer_scale is not None:
        saved.append(SavedActivations(sublayers * rows * width))
    if block.dropout > 0:
        saved.append(SavedActivations(raw_bytes=sublayers * rows * width))
    return sum(saved, NOTHING)


# -- checkpointing -----------------------------------------------------------------------------------------------------


def block_mode(block: BlockConfig, checkpointing: CheckpointMode) -> CheckpointMode:
    """Return how a block is recomputed: with batch norms entirely or not at all."""
    if checkpointing not in CHECKPOINT_MODES:
        raise ConfigError(f"checkpointing={checkpointing!r} is not one of {', '.join(map(repr, CHECKPOINT_MODES))}")
    norms = [block.norm, *(a.qk_norm for a in (block.attention, block.cross) if a is not None)]
    has_statistics = any(norm is not None and norm.row.has_running_statistics for norm in norms)
    return bool(checkpointing) if has_statistics else checkpointing


def recomputes_attention(attention: AttentionConfig, width: int, length: int) -> bool:
    """Return whether selective checkpointing recomputes self-attention, because it has no kernel that can be kept."""
    return choose_kernel(attention, width, length, length, fused=True) != "fused"


def product_outputs(block: BlockConfig, shape: BatchShape, length: int, *, fused: bool = False) -> SavedActivations:
    """Count the outputs of the products of a block, which selective checkpointing keeps."""
    outputs = [
        _attention_outputs(block.attention, block.width, shape.batch, length, length, fused=fused),
        _feedforward_outputs(block, shape.batch * length),
    ]
    if block.cross:
        outputs.append(_attention_outputs(block.cross, block.width, shape.batch, length, shape.source, fused=fused))
    return sum(outputs, NOTHING)


def _attention_outputs(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool
) -> SavedActivations:
    query, key, value, output = attention_linears(attention, width)
    kernel = choose_kernel(attention, width, queries, keys, fused=fused)
    elements = queries * (query.outputs + output.outputs) + keys * (key.outputs + value.outputs)
    if kernel != "fused":
        return SavedActivations(batch * elements)
    return SavedActivations(
        batch * (elements + queries * output.inputs), fp32_elements=batch * attention.heads * queries
    )


def _feedforward_outputs(block: BlockConfig, rows: int) -> SavedActivations:
    experts, router = block.feedforward.experts, router_linear(block.feedforward, block.width)
    outputs = sum(linear.outputs for linear in feedforward_linears(block.feedforward, block.width))
    if experts is None or router is None:
        return SavedActivations(rows * outputs)
    return SavedActivations(rows * (experts.top_k * outputs + router.outputs))


def kept_activations(
    block: BlockConfig, shape: BatchShape, length: int, *, checkpointing: CheckpointMode, fused: bool = False
) -> SavedActivations:
    """Count the activations of a block that exist from the forward to the backward pass."""
    mode = block_mode(block, checkpointing)
    if not mode:
        return block_activations(block, shape, length, fused=fused)
    block_input = SavedActivations(shape.batch * length * block.width)
    outputs = product_outputs(block, shape, length, fused=fused) if mode == "selective" else NOTHING
    return block_input + outputs


# -- a whole model -----------------------------------------------------------------------------------------------------


def input_activations(config: ModelConfig, shape: BatchShape) -> SavedActivations:
    """Count the activations that the inputs save: projections, convolutions, norms and dropout.

    Learned positions of patches and frames are looked up in every pass, which saves their indices.
    """
    saved = []
    for _, input_config, length in iterate_inputs(config, shape):
        rows, size = shape.batch * length, config.width
        index_bytes = 8 if isinstance(input_config.positions, Learned) else 0
        if isinstance(input_config, PatchConfig):
            patches = shape.batch * (length - input_config.num_prefix_tokens)
            pixels = patches * patch_linear(input_config, size).inputs
            saved.append(SavedActivations(pixels, raw_bytes=index_bytes * input_config.num_positions))
        elif isinstance(input_config, FramesConfig):  # two frames a position: both convolutions and both activations
            frames = rows * (2 * input_config.channels + 2 * size + 2 * size + size)
            saved.append(SavedActivations(frames, raw_bytes=index_bytes * length))
        elif projection := projection_linear(input_config, size):
            saved.append(SavedActivations(rows * projection.inputs))
            size = projection.inputs if input_config.projection == "last" else size
        if isinstance(input_config, EmbeddingConfig) and input_config.scale != 1.0:
            saved.append(SavedActivations(1))
        saved.append(norm_activations(input_config.norm, rows, size))
        saved.append(SavedActivations(raw_bytes=rows * size if input_config.dropout > 0 else 0))
    return sum(saved, NOTHING)


def head_activations(config: ModelConfig, shape: BatchShape, *, with_logits: bool = True) -> SavedActivations:
    """Count the activations that the head saves, `with_logits` also the logits and their log-softmax for the loss."""
    head = config.head
    if head is None:
        return NOTHING
    saved = [_pooling_activations(config, head, shape)]
    for index, linear in enumerate(head_linears(config)):
        rows = shape.batch * (shape.target if linear.applied_to == "tokens" else 1)
        reads_stack = index == 0 or linear.name == "teacher"
        # A pooled vector is a view of all positions, which _pooling_activations counts.
        is_view = reads_stack and head.pooling != "mean" and linear.applied_to == "sequences"
        saved.append(SavedActivations(0 if is_view else rows * linear.inputs))
        if linear.name == "output" and head.kind != "pooled":
            logits, tensors = rows * linear.outputs, 1 if head.softcap is None else 2
            saved.append(norm_activations(head.norm, rows, linear.inputs))
            saved.append(SavedActivations((tensors - (not with_logits)) * logits, fp32_elements=with_logits * logits))
            saved.append(SavedActivations(raw_bytes=rows * linear.inputs if head.dropout > 0 else 0))
        elif linear.name == "transform" and head.transform:
            saved.append(SavedActivations(ACTIVATION_ROWS[head.transform].tensors * rows * linear.outputs))
    return sum(saved, NOTHING)


def _pooling_activations(config: ModelConfig, head: HeadConfig, shape: BatchShape) -> SavedActivations:
    """Count what pooling saves.

    It saves the vectors of all positions if it selects one of them, the activation of the pooler, and the lengths of
    the vectors if these are normalized.
    """
    saves_input = head.kind != "pooled" or head.pooler != "none" or head.normalize or head.project is not None
    if head.kind not in SEQUENCE_HEADS or not saves_input:
        return NOTHING
    positions = shape.target if head.pooling != "mean" else 0
    is_last = (head.kind == "pooled" and head.project is None) or head.dropout > 0  # no matrix saves the output
    tensors, saves_output, _ = ACTIVATION_ROWS["identity" if head.pooler == "none" else head.pooler]
    vectors = tensors + (saves_output and is_last)
    if head.normalize and head.pooling == "mean":
        vectors = max(vectors, 1)
    return SavedActivations(shape.batch * ((positions + vectors) * config.width + (2 if head.normalize else 0)))


def outside_activations(config: ModelConfig, shape: BatchShape, *, fused: bool, recomputed: bool) -> SavedActivations:
    """Count the activations of inputs and of the norms of stacks, and what the blocks of a stack share."""
    saved = [input_activations(config, shape)]
    for name, stack in config.stacks.items():
        length = shape.length(name)
        saved.append(norm_activations(stack.norm, shape.batch * length, stack.width))
        saved += [
            shared_attention_activations(attention, stack.width, length, fused=fused, recomputed=recomputed)
            for attention in {block.attention for block in count_blocks(stack)}
        ]
    if config.family == "encoder-decoder":  # the encoder output, which the cross-attention of all blocks reads
        saved.append(SavedActivations(shape.batch * shape.source * config.width))
    return sum(saved, NOTHING)


def model_activations(
    config: ModelConfig, shape: BatchShape, *, fused: bool = False, checkpointing: CheckpointMode = False
) -> SavedActivations:
    """Count the activations that are saved at the end of the forward pass.

    With checkpointing, count those at the peak of the backward pass: `recomputed` is the rest of a block.  `fused`
    attention kernels save no attention weights.
    """
    saved = [
        outside_activations(config, shape, fused=fused, recomputed=bool(checkpointing)),
        head_activations(config, shape),
    ]
    recomputed = []
    for name, stack in config.stacks.items():
        length = shape.length(name)
        for block, times in count_blocks(stack).items():
            kept = kept_activations(block, shape, length, checkpointing=checkpointing, fused=fused)
            whole = block_activations(block, shape, length, fused=fused)
            saved.append(kept * times)
            recomputed.append(whole + kept * -1)
    largest = max(recomputed, key=lambda saved: saved.elements + saved.attention_elements)
    return sum(saved, largest)


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
    return SavedActivations(elements + logits, attention_elements=pairs, fp32_elements=logits)
