"""What a forward pass must keep for the backward pass.

For each token, in numbers of the computing dtype (statistics, of norms and of the fused softmax, are fp32):

    each norm                its input D, and its statistics: 2 (layer) or 1 (rms)
    self-attention           its input D, queries H·K, keys G·K, values G·Kv, and what the output matrix reads, H·Kv
      plain                  the attention weights, H·S a token: counted apart, as `matrices`
      fused                  one number a head instead, the logarithm of a sum
    cross-attention          the same; keys and values are a token of the source, whose encoding is kept once
    feed-forward             its input D, the hidden F before and after the activation
      gated                  F four times: gate, up, the activated gate, the product
      experts                that of each expert the token is sent to, and the router's scores
    dropout                  a byte for every number it may drop; on attention weights also the weights after it
    QK norm, layer scale     what they multiply
    softcap                  the capped scores, one more matrix
    head                     what each of its matrices reads, the logits, and their log-softmax in fp32 for the loss

Parallel attention and feed-forward read the same tensor, and it is counted once.  With checkpointing only the input of
each block is kept, and the activations of the largest block while it is run again.  Not counted: workspaces,
fragmentation, token ids, tables of positions and masks, which do not grow with depth.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from monoblock.accounting.flops import Sizes, reads
from monoblock.accounting.parameters import attention_linears, head_linears, norm_count, patch_linear, projection_linear
from monoblock.config import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
    StackConfig,
)


class Held(NamedTuple):
    """Numbers of the computing dtype, attention weights of that dtype, numbers of fp32, and bytes."""

    numbers: int = 0
    matrices: int = 0
    singles: int = 0
    bytes: int = 0


def join(*held: Held) -> Held:
    return Held(*(sum(column) for column in zip(*held, strict=True))) if held else Held()


def times(number: int, held: Held) -> Held:
    return Held(*(number * one for one in held))


def norm_held(norm: NormConfig | None, rows: int, size: int) -> Held:
    return Held() if norm is None else Held(rows * size, singles=rows * (2 if norm.kind == "layer" else 1))


def attention_held(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool = False
) -> Held:
    """Attention from its normed input to what its output matrix reads."""
    query, key, value, output = attention_linears(attention, width)
    found = Held(batch * (queries * (width + query.outputs + output.inputs) + keys * (key.outputs + value.outputs)))
    if attention.qk_norm:
        across = attention.qk_norm_over == "width"  # one norm over all heads, not one a head
        heads, groups = (1, 1) if across else (attention.heads, attention.groups)
        found = join(
            found,
            norm_held(attention.qk_norm, batch * queries * heads, query.outputs // heads),
            norm_held(attention.qk_norm, batch * keys * groups, key.outputs // groups),
        )
    if fused:
        return found._replace(singles=found.singles + batch * attention.heads * queries)
    matrix = batch * attention.heads * queries * keys
    copies = 1 + (attention.dropout > 0) + (attention.softcap is not None)
    return found._replace(matrices=copies * matrix, bytes=matrix if attention.dropout > 0 else 0)


def feedforward_held(feedforward: FeedForwardConfig, width: int, rows: int) -> Held:
    experts = feedforward.experts
    routes, scores = (experts.top_k, experts.count) if experts else (1, 0)
    hidden = (4 if feedforward.gated else 2) * feedforward.hidden
    dropped = feedforward.hidden if feedforward.dropout > 0 else 0
    return Held(rows * (routes * (width + hidden) + scores), bytes=rows * routes * dropped)


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
    blocks = (times(count, block_held(b, size, length, fused=fused)) for b, count in Counter(stack.layers()).items())
    return join(*blocks)


def _checkpointed(stack: StackConfig, size: Sizes, length: int, fused: bool) -> tuple[Held, Held]:
    """The inputs of all blocks, and what the largest block holds beside its own while it is run again."""
    entry = Held(size.batch * length * stack.width)
    blocks = [block_held(block, size, length, fused=fused) for block in set(stack.layers())]
    largest = max(blocks, key=lambda held: held.numbers + held.matrices)
    return times(stack.depth, entry), join(largest, times(-1, entry))


def _inputs(config: ModelConfig, size: Sizes) -> Held:
    found = []
    for _, given, length in reads(config, size):
        rows, wide = size.batch * length, config.width
        if isinstance(given, PatchConfig):
            found.append(Held(size.batch * (length - given.prefix) * patch_linear(given, wide).inputs))
        elif projection_linear(given, wide):
            wide = given.dim or wide
            found.append(Held(rows * wide))
        found.append(norm_held(given.norm, rows, wide))
        found.append(Held(bytes=rows * wide if given.dropout > 0 else 0))
    return join(*found)


def _head(config: ModelConfig, size: Sizes) -> Held:
    if config.head is None:
        return Held()
    found = []
    for linear in head_linears(config):
        rows = size.batch * (size.target if linear.rows == "tokens" else 1)
        found.append(Held(rows * linear.inputs))
        if linear.name == "output":
            logits = rows * linear.outputs
            found += [norm_held(config.head.norm, rows, linear.inputs), Held(logits, singles=logits)]
        elif linear.name != "projection":  # before the activation of transform or pooler
            found.append(Held(rows * linear.outputs))
    return join(*found)


def activations(config: ModelConfig, size: Sizes, *, fused: bool = False, checkpointing: bool = False) -> Held:
    """Everything held when the forward pass ends (with checkpointing: at the worst moment of the backward pass)."""
    found, again = [_inputs(config, size), _head(config, size)], [Held()]
    for place, stack in config.stacks.items():
        length = size.source if place == "encoder" else size.target
        found.append(norm_held(stack.norm, size.batch * length, stack.width))
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
