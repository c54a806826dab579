"""The keyword arguments of `vary` and of the family constructors, for type checkers and editors.

They are the names in KNOBS of config/knobs.py, which says what each of them changes.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from monoblock.config.parts import Activation
from monoblock.config.positions import Scaling


class StyleKnobs(TypedDict, total=False):
    """The knobs that are not a named parameter of any family constructor."""

    segments: int
    embedding_scale: float | Literal["sqrt_width"]
    embedding_norm: bool
    class_token: bool
    kv_heads: int | None
    value_dim: int | None
    scale: float | None
    softcap: float | None
    mask: Literal["causal", "prefix", "full"]
    window: int | None
    qk_norm: bool
    positions: Literal["none", "sinusoid", "learned", "rotary", "alibi", "buckets"]
    rotary_base: float
    rotary_dim: int | None
    scaling: Scaling | None
    activation: Activation
    gated: bool
    experts: int
    top_k: int
    norm: Literal["layer", "rms"]
    eps: float
    norm_place: Literal["pre", "post", "output", "sandwich"]
    residual: Literal["sequential", "parallel", "parallel_shared"]
    bias: bool
    dropout: float
    attention_dropout: float
    embedding_dropout: float
    word_dropout: float
    head_dropout: float
    pooling: Literal["first", "last", "mean"]
    pooler: Literal["none", "tanh", "relu", "gelu"]
    tie: Literal["none", "output", "source_target", "three_way"]
    init: Literal["normal", "xavier", "t5", "small"]
    std: float


class HeadSizeKnobs(StyleKnobs, total=False):
    """The knobs of a family whose constructor has `hidden`, but not `head_dim`."""

    head_dim: int | None


class SizeKnobs(HeadSizeKnobs, total=False):
    """The knobs of a family whose constructor has neither `hidden` nor `head_dim`."""

    hidden: int


class Knobs(SizeKnobs, total=False):
    """All knobs."""

    vocab: int
    context: int | None
    image: int
    patch: int
    channels: int
    width: int
    depth: int
    heads: int
    head: str  # a kind of head for an encoder, or "none"
    classes: int
