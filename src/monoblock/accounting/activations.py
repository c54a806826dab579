"""What a forward pass must keep for the backward pass.

For each token, in numbers of the computing dtype (statistics, of norms and of the fused softmax, are fp32):

    each norm                its input D, and its statistics: 2 (layer) or 1 (rms)
    self-attention           its input D, queries H·K, keys G·K, values G·Kv, and what the output matrix reads, H·Kv
      plain                  the attention weights, H·S a token: counted apart, as `matrices`
      fused                  one number a head instead, the logarithm of a sum; H·Kv once more where positions turn
                             the queries or blind rows are zeroed
      softcap, sinks         no kernel has them: `attend` runs, fused or not, with keys and values repeated to H heads,
                             the weights with what may not be seen at zero, the capped scores, and two masks of bytes
    cross-attention          the same; keys and values are a token of the source, whose encoding is kept once
    feed-forward             its input D, what the activation keeps (INSIDE), and what the last matrix reads, F
      gated                  up and the activated gate besides
      experts                that of each expert the token is sent to, its output twice, and the router's scores
    dropout                  a byte for every number it may drop; on attention weights also the weights after it
    QK norm, clip, layer scale     what they work on
    head                     what each of its matrices reads, the logits, and their log-softmax in fp32 for the loss;
                             a vector taken from the first or last place keeps the places beside it

For each pair of places, whatever the batch: a bias on the scores once for each kind of block (with its buckets, 8 bytes
a pair, where it is learned), and a mask that is neither all nor causal once a block, because the kernel makes numbers
of it; from 128 tokens on FlexAttention keeps none.

Parallel attention and feed-forward read the same tensor, and it is counted once.  With checkpointing only the input of
each block is kept, and the activations of the largest block while it is run again.  Not counted: workspaces,
fragmentation, token ids.

This is exact in fp32 for kernels that keep no more than they need.  A CPU's keep more: its rms_norm the normed numbers,
its dropout four bytes a number, and its attention all weights where dropout falls on them or the bias is learned; it
has no FlexAttention either.  A GPU's in fp32 know no grouped heads and keep all weights there.  In 16 bits the scores
of the plain path, the numbers inside rms_norm and the residual stream under autocast are fp32 all the same.
"""

from __future__ import annotations

from monoblock.accounting.flops import Sizes, reads
from monoblock.accounting.held import Held, attention_held, join, norm_held, times, view_held
from monoblock.accounting.parameters import block_counts, head_linears, norm_count, patch_linear, projection_linear
from monoblock.config import (
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    ModelConfig,
    PatchConfig,
    RecurrentConfig,
    StackConfig,
)

# Activation -> the tensors it keeps that nobody else reads, and whether it keeps its result, which the next part reads.
INSIDE = {
    "relu": (0, True),
    "relu2": (1, False),
    "gelu": (1, False),
    "gelu_tanh": (1, False),
    "quick_gelu": (2, False),
    "silu": (1, False),
    "sigmoid": (0, True),
    "tanh": (0, True),
    "identity": (0, False),
}


# -- a block -----------------------------------------------------------------------------------------------------------


def feedforward_held(feedforward: FeedForwardConfig, width: int, rows: int) -> Held:
    routed = feedforward.experts
    routes = rows * routed.top_k if routed else rows
    found = Held(
        routes * (width + _hidden_tensors(feedforward) * feedforward.hidden),
        bytes=routes * feedforward.hidden if feedforward.dropout > 0 else 0,
    )
    if routed is None:
        return found
    scores = {
        "softmax_renormalized": routed.count + routed.top_k + 1,
        "softmax": routed.count,
        "top_k_softmax": routed.top_k,
    }
    # The router's input and scores; of each expert its output, its weight and their product; three places of 8 bytes.
    router = Held(rows * (width + scores[routed.router]) + routes * (2 * width + 1), bytes=24 * routes)
    return join(found, router)


def _hidden_tensors(feedforward: FeedForwardConfig) -> int:
    """How many tensors of the hidden size are kept."""
    inside, result = INSIDE[feedforward.activation]
    if feedforward.gated:
        return inside + 3 + (2 if feedforward.clamp is not None else 0)
    return inside + 1 + (result and feedforward.dropout > 0)


def block_held(block: BlockConfig, size: Sizes, length: int, *, fused: bool = False) -> Held:
    """One block over `length` tokens of each sequence; cross-attention reads `size.source` tokens."""
    rows, width = size.batch * length, block.width
    found = [
        times(norm_count(block), norm_held(block.norm, rows, width)),
        attention_held(block.attention, width, size.batch, length, length, fused=fused),
        feedforward_held(block.feedforward, width, rows),
    ]
    if block.cross:
        found.append(attention_held(block.cross, width, size.batch, length, size.source, fused=fused))
    sublayers = 3 if block.cross else 2
    if block.residual != "sequential":
        found.append(Held(-rows * width))  # both branches read one tensor
    if block.layer_scale is not None:
        found.append(Held(sublayers * rows * width))
    if block.dropout > 0:
        found.append(Held(bytes=sublayers * rows * width))
    return join(*found)


def _stack(stack: StackConfig, size: Sizes, length: int, fused: bool) -> Held:
    counts = block_counts(stack).items()
    return join(*(times(count, block_held(block, size, length, fused=fused)) for block, count in counts))


def _checkpointed(stack: StackConfig, size: Sizes, length: int, fused: bool) -> tuple[Held, Held]:
    """The inputs of all blocks, and what the largest block holds beside its own while it is run again."""
    entry = Held(size.batch * length * stack.width)
    blocks = [block_held(block, size, length, fused=fused) for block in block_counts(stack)]
    largest = max(blocks, key=lambda held: held.numbers + held.matrices)
    return times(stack.depth, entry), join(largest, times(-1, entry))


# -- a whole model -----------------------------------------------------------------------------------------------------


def _inputs(config: ModelConfig, size: Sizes) -> Held:
    found = []
    for _, given, length in reads(config, size):
        rows, wide = size.batch * length, config.width
        if isinstance(given, PatchConfig):
            found.append(Held(size.batch * (length - given.prefix) * patch_linear(given, wide).inputs))
        elif isinstance(given, FramesConfig):  # two frames a place: what each convolution reads, and each activation
            found.append(Held(rows * (2 * given.channels + 2 * wide + 2 * wide + wide)))
        elif projection := projection_linear(given, wide):
            found.append(Held(rows * projection.inputs))
            wide = projection.inputs if given.projection == "last" else wide
        if isinstance(given, EmbeddingConfig) and given.scale != 1.0:
            found.append(Held(1))
        found.append(norm_held(given.norm, rows, wide))
        found.append(Held(bytes=rows * wide if given.dropout > 0 else 0))
    return join(*found)


def _head(config: ModelConfig, size: Sizes) -> Held:
    head = config.head
    if head is None:
        return Held()
    linears = head_linears(config)
    found = [_pooled(config, head, size)]
    for place, linear in enumerate(linears):
        rows = size.batch * (size.target if linear.rows == "tokens" else 1)
        first = place == 0 or linear.name == "teacher"
        taken = first and head.pooling != "mean" and linear.rows == "sequences"  # counted with the places
        found.append(Held(0 if taken else rows * linear.inputs))
        if linear.name == "output" and head.kind != "pooled":
            logits = rows * linear.outputs * (1 if head.softcap is None else 2)
            found += [norm_held(head.norm, rows, linear.inputs), Held(logits, singles=rows * linear.outputs)]
            found.append(Held(bytes=rows * linear.inputs if head.dropout > 0 else 0))
        elif linear.name == "transform" and head.transform:
            found.append(Held(INSIDE[head.transform][0] * rows * linear.outputs))
    return join(*found)


def _pooled(config: ModelConfig, head: HeadConfig, size: Sizes) -> Held:
    """All places where one of them is read, what the pooler's activation keeps that no matrix reads, and lengths."""
    reads_it = head.kind == "classifier" or head.pooler != "none" or head.normalize or head.project is not None
    if head.kind not in ("classifier", "pooled") or not reads_it:
        return Held()
    places = size.target if head.pooling != "mean" else 0
    alone = (head.kind == "pooled" and head.project is None) or head.dropout > 0
    inside, result = INSIDE["identity" if head.pooler == "none" else head.pooler]
    vectors = inside + (result and alone)
    if head.normalize and head.pooling == "mean":
        vectors = max(vectors, 1)
    return Held(size.batch * ((places + vectors) * config.width + (2 if head.normalize else 0)))


def activations(config: ModelConfig, size: Sizes, *, fused: bool = False, checkpointing: bool = False) -> Held:
    """Everything held when the forward pass ends (with checkpointing: at the worst moment of the backward pass)."""
    found, again = [_inputs(config, size), _head(config, size)], [Held()]
    for place, stack in config.stacks.items():
        length = size.source if place == "encoder" else size.target
        found.append(norm_held(stack.norm, size.batch * length, stack.width))
        kinds = {block.attention for block in block_counts(stack)}
        found += [view_held(kind, stack.width, length, fused=fused) for kind in kinds]
        if checkpointing:
            kept, largest = _checkpointed(stack, size, length, fused)
            found.append(kept)
            again.append(largest)
        else:
            found.append(_stack(stack, size, length, fused))
    if config.family == "encoder-decoder":
        found.append(Held(size.batch * size.source * config.width))  # read by the keys and values of every block
    return join(*found, max(again, key=lambda held: held.numbers + held.matrices))


def recurrent_activations(config: RecurrentConfig, size: Sizes) -> Held:
    """A layer keeps its input, four gates, the cell and its tanh; additive attention a vector a pair of places."""
    width, rows, read = config.width, size.batch * size.target, size.batch * size.source
    kept = Held(rows * config.depth * 7 * width + rows * width)
    if config.kind == "encoder_decoder":
        encoder = Held(read * 2 * config.depth * 7 * width + read * 3 * width)
        attention = Held(rows * 6 * width + rows * size.source * width, matrices=rows * size.source)
        kept = join(kept, encoder, attention)
    logits = rows * (config.target_vocab or config.vocab)
    return join(kept, Held(logits, singles=logits))
