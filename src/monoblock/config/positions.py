"""Position schemes, one class each; `kind` tells them apart in JSON.

Learned and Sinusoid are added to the embedding; Rotary, Alibi and Buckets act inside attention, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.config.schema import check_at_least, check_types
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of rotary frequencies for contexts longer than the one trained on."""

    kind: Literal["linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the range of interpolated pairs to whole numbers
    attention_factor: float | None = None  # yarn, longrope; None: as in the paper
    short_factors: tuple[float, ...] = ()  # longrope, one for each frequency
    long_factors: tuple[float, ...] = ()  # longrope

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
        if self.factor <= 0:
            raise ConfigError(f"scaling factor={self.factor} must be positive; 1.0 leaves the frequencies alone")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """RoPE (Su et al. 2021): rotate pairs of query and key features by an angle proportional to the position."""

    kind: Literal["rotary"] = "rotary"
    base: float = 10000.0
    dim: int | None = None  # features of the head that are rotated; None: all
    layout: Literal["half", "interleaved"] = "half"  # pairs (i, i + K/2) or (2i, 2i + 1)
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"rotary base={self.base} must be above 1; 10000.0 is usual")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(
                f"rotary dim={self.dim} must be even, because pairs are rotated; write {max(2, self.dim + 1)}"
            )


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """ALiBi (Press et al. 2022): a linear penalty on distance, with one slope for each head."""

    kind: Literal["alibi"] = "alibi"
    form: Literal["distance", "falcon"] = "distance"  # falcon: slope * key position in bf16, scaled like the scores
    max_bias: float = 8.0

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A learned bias for each head and bucket of distances (T5); if `shared`, all blocks of a stack use one table."""

    kind: Literal["buckets"] = "buckets"
    count: int = 32
    max_distance: int = 128
    shared: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 4, "count")
        half = self.count // 2
        if self.max_distance <= half:
            raise ConfigError(
                f"max_distance={self.max_distance} must exceed half of count={self.count}; write {half + 1} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Sinusoid:
    """Fixed sines and cosines added to the embedding (Vaswani et al. 2017, 3.5)."""

    kind: Literal["sinusoid"] = "sinusoid"
    form: Literal["interleaved", "halves", "fairseq", "grid"] = "interleaved"  # grid: rows and columns of an image
    base: float = 10000.0
    offset: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"sinusoid base={self.base} must be above 1; 10000.0 is usual")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned vector for each position up to the context; the first `offset` rows of the table are unused."""

    kind: Literal["learned"] = "learned"
    offset: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "offset")
