"""The configurations of a block and of a stack of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from monoblock.config.limits import MAX_LAYERS, MAX_WIDTH
from monoblock.config.parts import AttentionConfig, FeedForwardConfig, NormConfig
from monoblock.config.schema import check_at_least, check_at_most, check_fraction, check_types, shorten_int
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One Transformer block."""

    width: int  # D, the size of the hidden states
    attention: AttentionConfig  # self-attention
    feedforward: FeedForwardConfig  # the feed-forward network
    cross: AttentionConfig | None = None  # cross-attention to the encoder
    norm: NormConfig = NormConfig()  # the norm of each sublayer
    # "pre": on the input of a sublayer; "post": after the residual sum; "output": on its output; "sandwich": on both
    norm_place: Literal["pre", "post", "output", "sandwich"] = "pre"
    attention_norm: bool = True  # False: the input is normalized already (first block of ModernBERT)
    # attention, then feed-forward; both at once; "none": one after the other, and the input is not added to the output
    residual: Literal["sequential", "parallel", "parallel_shared", "none"] = "sequential"
    residual_scale: float = 1.0  # factor on the output of each sublayer (Granite)
    layer_scale: float | None = None  # initial value of a learned gain for each output channel (DINOv2)
    dropout: float = 0.0  # dropout probability of the output of each sublayer

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "width")
        check_at_most(self, MAX_WIDTH, "width")
        check_fraction(self, "dropout")
        self.attention.check_width(self.width)
        if self.is_parallel and (self.norm_place != "pre" or self.cross is not None):
            raise ConfigError(
                f"residual={self.residual!r} is possible only with pre-norm and without cross-attention; "
                "write norm_place='pre' and cross=None, or residual='sequential'"
            )
        if self.is_parallel and not self.feedforward.hidden:
            raise ConfigError(
                f"residual={self.residual!r} runs attention and feed-forward at once, but hidden=0 leaves no "
                "feed-forward network; write residual='sequential'"
            )
        if not self.attention_norm and (self.norm_place != "pre" or self.residual == "parallel_shared"):
            raise ConfigError("attention_norm=False needs norm_place='pre', and residual='sequential' or 'parallel'")
        if self.cross is not None:
            self._check_cross(self.cross)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and feed-forward read the same input."""
        return self.residual in ("parallel", "parallel_shared")

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The names of the sublayers, in the order they run."""
        cross = ("cross",) if self.cross is not None else ()
        return ("attention", *cross, *(("feedforward",) if self.feedforward.hidden else ()))

    def _check_cross(self, cross: AttentionConfig) -> None:
        cross.check_width(self.width)
        if cross.window is not None:
            raise ConfigError(
                "cross-attention has no window: source and target positions are not comparable; write window=None"
            )
        if cross.kind != "softmax":
            raise ConfigError("cross-attention is computed with a softmax only; write kind='softmax' for it")
        if cross.mask != "full" or cross.positions is not None:
            raise ConfigError(
                "cross-attention sees the whole source and has no relative positions; "
                "write mask='full' and positions=None"
            )


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A sequence of blocks, repeated `times` times; if `tied`, all repetitions share their weights (ALBERT)."""

    blocks: tuple[BlockConfig, ...]  # the sequence of blocks
    times: int = 1  # how often it is repeated
    tied: bool = False  # whether the repetitions share their weights (ALBERT)

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "times")
        check_at_most(self, MAX_LAYERS, "times")
        if not self.blocks:
            raise ConfigError("a Repeat needs at least one block; add one to blocks")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The blocks of an encoder or decoder, and the norm after them."""

    pattern: tuple[Repeat, ...]  # the blocks, from the first to the last
    norm: NormConfig | None = None  # norm after the last block

    def __post_init__(self) -> None:
        check_types(self)
        if self.depth > MAX_LAYERS:
            raise ConfigError(f"a stack of {shorten_int(self.depth)} blocks is too deep; write {MAX_LAYERS} or less")
        if len({block.width for block in self.layers()}) != 1:
            raise ConfigError("a stack needs at least one block, and all its blocks need the same width")
        tables = {
            (a.positions, a.num_unpruned_heads)
            for a in self._self_attentions()
            if getattr(a.positions, "shared", False)
        }
        if len(tables) > 1:
            raise ConfigError(
                "the blocks of a stack share one table of position buckets, so they need equal Buckets and numbers of "
                "heads; write Buckets(shared=False) to give each block its own"
            )

    def _self_attentions(self) -> Iterator[AttentionConfig]:
        return (block.attention for block in self.layers())

    def layers(self) -> Iterator[BlockConfig]:
        """Iterate over the blocks in the order they run."""
        return (block for run in self.pattern for _ in range(run.times) for block in run.blocks)

    def layers_with_ownership(self) -> Iterator[tuple[BlockConfig, bool]]:
        """Iterate over pairs of a block and whether it owns its weights.

        Later repetitions of tied blocks do not: they use the weights of the first.
        """
        return (
            (block, not run.tied or repetition == 0)
            for run in self.pattern
            for repetition in range(run.times)
            for block in run.blocks
        )

    @property
    def depth(self) -> int:
        return sum(run.times * len(run.blocks) for run in self.pattern)

    @property
    def width(self) -> int:
        return self.pattern[0].blocks[0].width
