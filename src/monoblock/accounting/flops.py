"""The floating-point operations (FLOPs) of a pass: a multiplication and an addition for every term of a matrix product.

    R rows times an M × N matrix        2·R·M·N
    attention of T queries to S keys    2·H·T·S·K for the scores and 2·H·T·S·Kv for the weighted sum

Linear attention computes no pairs. With L = min(T, CHUNK) tokens in a chunk, and T rounded up to n whole chunks:

    full        2·(G + H)·T·K·Kv
    causal      2·H·T·L·(K + Kv) inside chunks, and for n > 1 between them 2·H·T·K·Kv + 2·G·(n - 1)·L·K·Kv

`forward` counts all T·S pairs, as a dense computation does and as the FLOP counter of torch counts. `forward_needed`
counts only the pairs that the mask allows: about half of them for a causal mask, fewer in a window. (It leaves out
pairs that a prefix, global tokens or random blocks allow in addition.) Of linear attention it counts 2·(G + H)·T·K·Kv,
what a pass token by token needs. Of the experts only those that a token is routed
to are counted. Norms, activations, softmax and biases are not counted, because memory bandwidth limits their speed.

The backward pass computes two products for each product of the forward pass, for the gradients of both factors; the
input of the first convolution on patches or frames needs no gradient. Checkpointing runs the forward pass of the blocks
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from monoblock.accounting.lstm import recurrent_flops
from monoblock.accounting.parameters import (
    LinearShape,
    attention_linears,
    count_blocks,
    feedforward_linears,
    frame_linears,
    head_linears,
    patch_linear,
    projection_linear,
    router_linear,
)
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FramesConfig,
    Learned,
    ModelConfig,
    PatchConfig,
    RecurrentConfig,
    StackConfig,
)
from monoblock.errors import InputError

CHUNK = 64  # tokens in a chunk of causal linear attention, as in nn/linear_attention.py
DEFAULT_LENGTH = 512  # for a model without a context
NO_INPUT_GRADIENT = ("input.patch", "input.first")  # products whose input is data, which needs no gradient


class BatchShape(NamedTuple):
    """Batch size, source length and target length; the two lengths are equal except in an encoder-decoder."""

    batch: int
    source: int
    target: int

    def length(self, stack: str) -> int:
        """Return the length of the texts that a stack reads, the "encoder" or the "decoder"."""
        return self.source if stack == "encoder" else self.target


def resolve_batch_shape(
    config: ModelConfig | RecurrentConfig, batch: int = 1, length: int | None = None, target_length: int | None = None
) -> BatchShape:
    """Return the batch size and the lengths; a missing length is the model's context, or DEFAULT_LENGTH without one.

    If only `length` is given, it is the length of both source and target.
    """
    for name, value in (("batch", batch), ("length", length), ("target_length", target_length)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} is too small; write 1 or more")
    if isinstance(config, RecurrentConfig):
        source = length or DEFAULT_LENGTH
        return BatchShape(batch, source, target_length or source if config.kind == "encoder_decoder" else source)
    if target_length is not None and config.family != "encoder-decoder":
        raise InputError(f"target_length={target_length} is for an encoder-decoder; for this model write length=…")
    source = _resolve_length(config.input, length, "length")
    if config.family != "encoder-decoder":
        return BatchShape(batch, source, source)
    target = target_length if target_length is not None else length
    return BatchShape(batch, source, _resolve_length(config.target_input, target, "target_length"))


def _resolve_length(input_config: EmbeddingConfig | PatchConfig | FramesConfig, length: int | None, name: str) -> int:
    context = input_config.context
    if length is None:
        return context or DEFAULT_LENGTH
    if isinstance(input_config, PatchConfig) and length != context:
        raise InputError(f"{name}={length} is wrong, because an image has {context} tokens in this model; leave it out")
    if isinstance(input_config.positions, Learned) and context is not None and length > context:
        raise InputError(
            f"{name}={length} is more than the {context} learned positions of this model; write {context} or less"
        )
    return length


# -- attention pairs ---------------------------------------------------------------------------------------------------


def count_visible_keys(length: int, window: int) -> int:
    """Count the (query, key) pairs of a causal mask with a window: Σ min(t + 1, window) over t = 0 … length - 1."""
    ramp = min(length, window)
    return ramp * (ramp + 1) // 2 + (length - ramp) * window


def count_attention_pairs(attention: AttentionConfig, length: int) -> int:
    """Count the (query, key) pairs that the mask of self-attention allows in a sequence."""
    causal_pairs = count_visible_keys(length, attention.window or length)
    return 2 * causal_pairs - length if attention.mask == "full" else causal_pairs


# -- layers --------------------------------------------------------------------------------------------------------


def matrix_flops(linears: Iterable[LinearShape], rows: int) -> int:
    return 2 * rows * sum(linear.num_weights for linear in linears)


def pair_flops(attention: AttentionConfig, width: int) -> int:
    """Return the FLOPs of one (query, key) pair in all heads, for its score and its term in the weighted sum."""
    return 2 * attention.heads * (attention.key_size(width) + attention.value_size(width))


def linear_attention_flops(attention: AttentionConfig, width: int, length: int, *, needed_only: bool = False) -> int:
    """Count the FLOPs of linear attention over `length` tokens; `needed_only` leaves out what chunks add."""
    size, value_size = attention.key_size(width), attention.value_size(width)
    if attention.mask == "full" or needed_only:
        return 2 * (attention.num_kv_heads + attention.heads) * length * size * value_size
    chunk = min(length, CHUNK)
    chunks = -(-length // chunk)
    flops = 2 * attention.heads * chunks * chunk * chunk * (size + value_size)
    if chunks > 1:
        flops += 2 * attention.heads * chunks * chunk * size * value_size
        flops += 2 * attention.num_kv_heads * (chunks - 1) * chunk * size * value_size
    return flops


def self_attention_flops(attention: AttentionConfig, width: int, length: int, *, visible_only: bool) -> int:
    """Count the FLOPs of self-attention over `length` tokens, without its projections."""
    if attention.kind == "linear":
        return linear_attention_flops(attention, width, length, needed_only=visible_only)
    pairs = count_attention_pairs(attention, length) if visible_only else length * length
    return pairs * pair_flops(attention, width)


def feedforward_flops(block: BlockConfig, rows: int) -> int:
    experts = block.feedforward.experts
    router = router_linear(block.feedforward, block.width)
    flops = matrix_flops(feedforward_linears(block.feedforward, block.width), rows)
    return flops if experts is None or router is None else matrix_flops((router,), rows) + experts.top_k * flops


def block_flops(
    block: BlockConfig, batch: int, length: int, source_length: int, *, visible_only: bool = False
) -> dict[str, int]:
    """Count the forward FLOPs of one block on `length` tokens by component.

    Cross-attention reads `source_length` tokens.  `visible_only` counts only the (query, key) pairs that the mask
    allows.
    """
    width = block.width
    rows = batch * length
    scores = self_attention_flops(block.attention, width, length, visible_only=visible_only)
    flops = {
        "attention.projections": matrix_flops(attention_linears(block.attention, width), rows),
        "attention.scores": batch * scores,
    }
    if block.cross:
        query, key, value, output = attention_linears(block.cross, width)
        source_rows = batch * source_length
        flops["cross.projections"] = matrix_flops((query, output), rows) + matrix_flops((key, value), source_rows)
        flops["cross.scores"] = rows * source_length * pair_flops(block.cross, width)
    flops["feedforward"] = feedforward_flops(block, rows)
    return flops


def stack_flops(
    stack: StackConfig, batch: int, length: int, source_length: int, *, visible_only: bool = False
) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for block, times in count_blocks(stack).items():
        components = block_flops(block, batch, length, source_length, visible_only=visible_only)
        counts.update({name: times * flops for name, flops in components.items()})
    return dict(counts)


def iterate_inputs(
    config: ModelConfig, shape: BatchShape
) -> Iterator[tuple[str, EmbeddingConfig | PatchConfig | FramesConfig, int]]:
    """Yield the name, configuration and length in tokens of each input."""
    yield "input", config.input, shape.source
    if config.family == "encoder-decoder":
        yield "target", config.target_input, shape.target


def _input_flops(config: ModelConfig, shape: BatchShape) -> Iterator[tuple[str, int]]:
    """Yield the FLOPs of each input by name; an embedding lookup costs none."""
    for name, input_config, length in iterate_inputs(config, shape):
        if isinstance(input_config, PatchConfig):
            rows = shape.batch * (length - input_config.num_prefix_tokens)
            yield f"{name}.patch", matrix_flops((patch_linear(input_config, config.width),), rows)
        elif isinstance(input_config, FramesConfig):
            first, second = frame_linears(input_config, config.width)
            yield f"{name}.first", matrix_flops((first,), shape.batch * 2 * length)  # two frames a position
            yield f"{name}.second", matrix_flops((second,), shape.batch * length)
        elif projection := projection_linear(input_config, config.width):
            yield f"{name}.projection", matrix_flops((projection,), shape.batch * length)


def _forward_flops(config: ModelConfig, shape: BatchShape, visible_only: bool) -> dict[str, int]:
    components = dict(_input_flops(config, shape))
    for stack_name, stack in config.stacks.items():
        length = shape.length(stack_name)
        blocks = stack_flops(stack, shape.batch, length, shape.source, visible_only=visible_only)
        components |= {f"{stack_name}.{name}": flops for name, flops in blocks.items()}
    for linear in head_linears(config):
        rows = shape.batch * (shape.target if linear.applied_to == "tokens" else 1)
        components[f"head.{linear.name}"] = matrix_flops((linear,), rows)
    return components


# -- a pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flops:
    """The FLOPs of one pass.

    `components` counts the forward pass by component, with all (query, key) pairs; `forward_needed` counts only the
    pairs that the mask allows.
    """

    shape: BatchShape
    components: Mapping[str, int]
    forward_needed: int

    @property
    def forward(self) -> int:
        return sum(self.components.values())

    @property
    def backward(self) -> int:
        return 2 * self.forward - sum(self.components.get(name, 0) for name in NO_INPUT_GRADIENT)

    @property
    def training(self) -> int:
        return self.forward + self.backward

    @property
    def forward_blocks(self) -> int:
        """FLOPs of the forward pass through the blocks, without input and head."""
        return sum(n for name, n in self.components.items() if name.startswith(("encoder.", "decoder.")))

    @property
    def training_checkpointed(self) -> int:
        """FLOPs of training if the blocks are recomputed in the backward pass."""
        return self.training + self.forward_blocks

    @property
    def tokens(self) -> int:
        """The number of target tokens in the batch."""
        return self.shape.batch * self.shape.target

    def to_dict(self) -> dict[str, object]:
        return {
            **self.shape._asdict(),
            "forward": self.forward,
            "forward_needed": self.forward_needed,
            "backward": self.backward,
            "training": self.training,
            "training_checkpointed": self.training_checkpointed,
            "components": dict(self.components),
        }


def flops(
    config: ModelConfig | RecurrentConfig,
    *,
    batch: int = 1,
    length: int | None = None,
    target_length: int | None = None,
) -> Flops:
    """Compute the FLOPs of a pass over `batch` sequences of `length` tokens, by default the model's context."""
    shape = resolve_batch_shape(config, batch, length, target_length)
    if isinstance(config, RecurrentConfig):
        components = needed = recurrent_flops(config, *shape)
    else:
        components = _forward_flops(config, shape, visible_only=False)
        needed = _forward_flops(config, shape, visible_only=True)
    return Flops(shape=shape, components=components, forward_needed=sum(needed.values()))


def rule_of_six(parameters: int, tokens: int) -> int:
    """Estimate the FLOPs of training as 6 · parameters · tokens (Kaplan et al. 2020).

    Every parameter costs 2 FLOPs per token in the forward pass and 4 in the backward pass.
    """
    return 6 * parameters * tokens


def gpu_hours(total_flops: float, *, peak: float, mfu: float) -> float:
    """Compute the hours that `total_flops` take on one GPU of `peak` FLOP/s at a model FLOPs utilization of `mfu`."""
    if peak <= 0 or not 0 < mfu <= 1:
        raise InputError(
            f"peak={peak:g} FLOP/s with mfu={mfu:g} is out of range; write a peak above 0, and an mfu above 0 and up "
            "to 1, such as 0.4"
        )
    return total_flops / (peak * mfu) / 3600
