"""Position schemes, one class each; `kind` tells them apart in JSON.

Learned and Sinusoid are added to the embedding; Rotary, Alibi and Buckets act inside attention, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.config.limits import MAX_BUCKETS, MAX_CONTEXT, MAX_POSITION_WEIGHTS, MAX_WIDTH
from monoblock.config.schema import check_at_least, check_at_most, check_types
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of rotary frequencies for contexts longer than the one trained on."""

    # how the frequencies are scaled
    kind: Literal["linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    factor: float = 1.0  # how many times longer the context becomes
    original_context: int | None = None  # the context that the model was trained on
    low_freq_factor: float = 1.0  # llama3: pairs with fewer turns in the original context are slowed by factor
    high_freq_factor: float = 4.0  # llama3: pairs with more turns are kept
    beta_fast: float = 32.0  # yarn: pairs with more turns in the original context are kept
    beta_slow: float = 1.0  # yarn: pairs with fewer turns are slowed by factor
    truncate: bool = True  # yarn: round the range of interpolated pairs to whole numbers
    attention_factor: float | None = None  # yarn, longrope: factor on queries and keys; None: as in the paper
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies in short texts
    long_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies in texts beyond the original context

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind in ("dynamic", "yarn", "longrope", "llama3") and self.original_context is None:
            raise ConfigError(
                f"{self.kind} scaling needs the length the model was trained on; write original_context=…"
            )
        if self.kind == "longrope" and not (self.short_factors and self.long_factors):
            raise ConfigError("longrope scaling needs short_factors and long_factors, one number for each frequency")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ConfigError(f"high_freq_factor={high} of llama3 scaling must be above low_freq_factor={low}")
        check_at_least(self, 1, "original_context")
        check_at_most(self, MAX_CONTEXT, "original_context")
        if self.factor <= 0:
            raise ConfigError(f"scaling factor={self.factor} must be positive; 1.0 leaves the frequencies alone")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """RoPE (Su et al. 2021): rotate pairs of query and key features by an angle proportional to the position."""

    kind: Literal["rotary"] = "rotary"  # the name of this scheme in JSON
    base: float = 10000.0  # the largest wavelength is about 2 pi times this
    dim: int | None = None  # features of the head that are rotated; None: all
    layout: Literal["half", "interleaved"] = "half"  # pairs (i, i + K/2) or (2i, 2i + 1)
    scaling: Scaling | None = None  # scaling for longer contexts; None: not scaled

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"rotary base={self.base} must be above 1; 10000.0 is usual")
        check_at_most(self, MAX_WIDTH, "dim")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(
                f"rotary dim={self.dim} must be even, because pairs are rotated; write {max(2, self.dim + 1)}"
            )


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """ALiBi (Press et al. 2022): a linear penalty on distance, with one slope for each head."""

    kind: Literal["alibi"] = "alibi"  # the name of this scheme in JSON
    form: Literal["distance", "falcon"] = "distance"  # falcon: slope * key position in bf16, scaled like the scores
    max_bias: float = 8.0  # the smallest slope is 2 to the power of minus this

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A learned bias for each head and bucket of distances (T5); if `shared`, all blocks of a stack use one table."""

    kind: Literal["buckets"] = "buckets"  # the name of this scheme in JSON
    count: int = 32  # number of buckets
    max_distance: int = 128  # all larger distances share a bucket
    shared: bool = True  # whether all blocks of a stack use one table

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 4, "count")
        check_at_most(self, MAX_BUCKETS, "count")
        check_at_most(self, MAX_CONTEXT, "max_distance")
        half = self.count // 2
        if self.max_distance <= half:
            raise ConfigError(
                f"max_distance={self.max_distance} must exceed half of count={self.count}; write {half + 1} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Sinusoid:
    """Fixed sines and cosines added to the embedding (Vaswani et al. 2017, 3.5)."""

    kind: Literal["sinusoid"] = "sinusoid"  # the name of this scheme in JSON
    form: Literal["interleaved", "halves", "fairseq", "grid"] = "interleaved"  # grid: rows and columns of an image
    base: float = 10000.0  # the largest wavelength is about 2 pi times this
    offset: int = 0  # the first position

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"sinusoid base={self.base} must be above 1; 10000.0 is usual")
        check_at_most(self, MAX_CONTEXT, "offset")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned vector for each position up to the context; the first `offset` rows of the table are unused."""

    kind: Literal["learned"] = "learned"  # the name of this scheme in JSON
    offset: int = 0  # number of unused rows at the start of the table (BART)

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "offset")
        check_at_most(self, MAX_POSITION_WEIGHTS, "offset")
