"""How many floating-point operations a pass takes: every product of matrices, a multiplication and an addition each.

    a matrix of m × n on r rows     2·r·m·n
    attention on T queries, S keys  2·H·T·S·K for the scores and 2·H·T·S·Kv for the weighted sum

`forward` counts the rectangle T·S whole, as a dense computation does and as torch's flop counter counts it.  `needed`
counts only the pairs that the mask lets through: half of it for a causal mask, less in a window.  (Pairs that depend on
the batch, by global tokens or a prefix, and random blocks are not in `needed`.)  Of the experts only those a token is
sent to are counted.  Norms, activations, softmax and the adding of biases are left out: memory bounds them.

The backward pass repeats each product twice, once for the gradient of either factor.  Only the patches of an image are
not learned, so their convolution is repeated once.  Checkpointing runs the blocks forward a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from monoblock.accounting.parameters import (
    Linear,
    attention_linears,
    block_counts,
    feedforward_linears,
    frame_linears,
    head_linears,
    patch_linear,
    projection_linear,
    router_linear,
)
from monoblock.accounting.recurrent import recurrent_flops
from monoblock.config import (
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

DEFAULT_LENGTH = 512  # where a model has no context of its own
UNLEARNED = ("input.patch", "input.first")  # products of which one factor is data


class Sizes(NamedTuple):
    """Batch, source length (the only one but for an encoder-decoder) and target length."""

    batch: int
    source: int
    target: int


def sizes(
    config: ModelConfig | RecurrentConfig, batch: int = 1, length: int | None = None, target_length: int | None = None
) -> Sizes:
    """Fill in what was not given: the context, or 512 tokens; the target as long as the source."""
    for name, value in (("batch", batch), ("length", length), ("target_length", target_length)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} cannot be counted; write 1 or more")
    if isinstance(config, RecurrentConfig):
        source = length or DEFAULT_LENGTH
        return Sizes(batch, source, target_length or source if config.kind == "encoder_decoder" else source)
    if target_length is not None and config.family != "encoder-decoder":
        raise InputError(f"target_length={target_length} is for an encoder-decoder; this model has one length")
    source = _fitting(config.input, length, "length")
    if config.family != "encoder-decoder":
        return Sizes(batch, source, source)
    target = target_length if target_length is not None else length
    return Sizes(batch, source, _fitting(config.output_input, target, "target_length"))


def _fitting(given: EmbeddingConfig | PatchConfig | FramesConfig, length: int | None, name: str) -> int:
    context = given.context
    if length is None:
        return context or DEFAULT_LENGTH
    if isinstance(given, PatchConfig) and length != context:
        raise InputError(f"{name}={length} cannot be: an image is {context} tokens here; leave the length out")
    if isinstance(given.positions, Learned) and context is not None and length > context:
        raise InputError(f"{name}={length} is longer than the {context} places learned; write {context} or less")
    return length


# -- who sees whom ---------------------------------------------------------------------------------------------------


def seen_before(length: int, window: int) -> int:
    """Sum over `length` tokens of the places each sees up to and including itself: min(t + 1, window)."""
    ramp = min(length, window)
    return ramp * (ramp + 1) // 2 + (length - ramp) * window


def pairs(attention: AttentionConfig, length: int) -> int:
    """How many (query, key) pairs self-attention needs over a sequence."""
    behind = seen_before(length, attention.window or length)
    return 2 * behind - length if attention.mask == "full" else behind


# -- the pieces --------------------------------------------------------------------------------------------------------


def matrix_flops(linears: Iterable[Linear], rows: int) -> int:
    return 2 * rows * sum(linear.matrix for linear in linears)


def pair_flops(attention: AttentionConfig, width: int) -> int:
    """What one query and one key cost: their product, and the value's share of the sum."""
    return 2 * attention.heads * (attention.key_size(width) + attention.value_size(width))


def feedforward_flops(block: BlockConfig, rows: int) -> int:
    experts = block.feedforward.experts
    router = router_linear(block.feedforward, block.width)
    one = matrix_flops(feedforward_linears(block.feedforward, block.width), rows)
    return one if experts is None or router is None else matrix_flops((router,), rows) + experts.top_k * one


def block_flops(block: BlockConfig, batch: int, length: int, memory: int, *, needed: bool = False) -> dict[str, int]:
    """One block over `length` tokens, its cross-attention over `memory` tokens of the encoder."""
    width = block.width
    rows = batch * length
    seen = pairs(block.attention, length) if needed else length * length
    found = {
        "attention.projections": matrix_flops(attention_linears(block.attention, width), rows),
        "attention.scores": batch * seen * pair_flops(block.attention, width),
    }
    if block.cross:
        query, key, value, output = attention_linears(block.cross, width)
        own, other = matrix_flops((query, output), rows), matrix_flops((key, value), batch * memory)
        found["cross.projections"] = own + other
        found["cross.scores"] = rows * memory * pair_flops(block.cross, width)
    found["feedforward"] = feedforward_flops(block, rows)
    return found


def stack_flops(stack: StackConfig, batch: int, length: int, memory: int, *, needed: bool = False) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for block, times in block_counts(stack).items():
        one = block_flops(block, batch, length, memory, needed=needed)
        counts.update({name: times * flops for name, flops in one.items()})
    return dict(counts)


def head_flops(config: ModelConfig, batch: int, tokens: int) -> dict[str, int]:
    """The head on so many tokens; what is pooled passes once a sequence."""
    return {
        linear.name: matrix_flops((linear,), batch * tokens if linear.rows == "tokens" else batch)
        for linear in head_linears(config)
    }


def reads(config: ModelConfig, size: Sizes) -> Iterator[tuple[str, EmbeddingConfig | PatchConfig | FramesConfig, int]]:
    """Each reading of an input: its place, what reads it, how many tokens it gives."""
    yield "input", config.input, size.source
    if config.family == "encoder-decoder":
        yield "target", config.output_input, size.target


def _input_flops(config: ModelConfig, size: Sizes) -> Iterator[tuple[str, int]]:
    """Looking a token up costs nothing; patches and factorised embeddings are products."""
    for place, given, length in reads(config, size):
        if isinstance(given, PatchConfig):
            rows = size.batch * (length - given.prefix)
            yield f"{place}.patch", matrix_flops((patch_linear(given, config.width),), rows)
        elif isinstance(given, FramesConfig):
            first, second = frame_linears(given, config.width)
            yield f"{place}.first", matrix_flops((first,), size.batch * 2 * length)  # two frames a place
            yield f"{place}.second", matrix_flops((second,), size.batch * length)
        elif projection := projection_linear(given, config.width):
            yield f"{place}.projection", matrix_flops((projection,), size.batch * length)


def _forward(config: ModelConfig, size: Sizes, needed: bool) -> dict[str, int]:
    found = dict(_input_flops(config, size))
    for place, stack in config.stacks.items():
        length = size.source if place == "encoder" else size.target
        blocks = stack_flops(stack, size.batch, length, size.source, needed=needed)
        found.update({f"{place}.{name}": flops for name, flops in blocks.items()})
    found.update({f"head.{name}": flops for name, flops in head_flops(config, size.batch, size.target).items()})
    return found


# -- a pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flops:
    """The work of one pass, `components` being its forward half; see the top of this file for what is counted."""

    size: Sizes
    components: Mapping[str, int]
    needed: int

    @property
    def forward(self) -> int:
        return sum(self.components.values())

    @property
    def backward(self) -> int:
        return 2 * self.forward - sum(self.components.get(name, 0) for name in UNLEARNED)

    @property
    def training(self) -> int:
        return self.forward + self.backward

    @property
    def blocks(self) -> int:
        """The forward pass of the blocks alone."""
        return sum(n for name, n in self.components.items() if name.startswith(("encoder.", "decoder.")))

    @property
    def checkpointed(self) -> int:
        """Training with the blocks recomputed in the backward pass."""
        return self.training + self.blocks

    @property
    def tokens(self) -> int:
        """Token positions the pass learns from: the target's."""
        return self.size.batch * self.size.target

    def to_dict(self) -> dict[str, object]:
        return {
            **self.size._asdict(),
            "forward": self.forward,
            "forward_needed": self.needed,
            "backward": self.backward,
            "training": self.training,
            "training_checkpointed": self.checkpointed,
            "components": dict(self.components),
        }


def flops(
    config: ModelConfig | RecurrentConfig,
    *,
    batch: int = 1,
    length: int | None = None,
    target_length: int | None = None,
) -> Flops:
    """The work of a pass over `batch` sequences; without lengths, of the model's context."""
    size = sizes(config, batch, length, target_length)
    if isinstance(config, RecurrentConfig):
        found = recurrent_flops(config, *size)
        return Flops(size=size, components=found, needed=sum(found.values()))  # a recurrence sees only its past
    needed = sum(_forward(config, size, needed=True).values())
    return Flops(size=size, components=_forward(config, size, needed=False), needed=needed)


def rule_of_six(parameters: int, tokens: int) -> int:
    """The usual estimate of training: 2 operations forward and 4 backward for every parameter and token."""
    return 6 * parameters * tokens


def gpu_hours(work: float, *, peak: float, mfu: float) -> float:
    """Hours on one GPU of `peak` FLOP/s that reaches the share `mfu` of it."""
    if peak <= 0 or not 0 < mfu <= 1:
        raise InputError(
            f"peak={peak:g} FLOP/s at mfu={mfu:g} cannot be; write peak above 0 and mfu up to 1, as in 0.4"
        )
    return work / (peak * mfu) / 3600
