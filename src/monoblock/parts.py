"""The parts a block, an input and a head are configured from: one frozen class a part, each choice a word or a number.

Where a choice depends on the width of the model it is a method that is given the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.errors import ConfigError
from monoblock.schema import check, check_at_least, check_fraction, check_positive, nearest_divisor
from monoblock.schemes import Alibi, Buckets, Learned, Rotary, Sinusoid

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh", "identity"]


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5
    affine: Literal["scale_shift", "scale", "none"] = "scale_shift"
    unit_offset: bool = False  # the scale is 1 + weight (Gemma, Nemotron)
    cast: Literal["before_scale", "after_scale"] = "before_scale"  # where 16-bit input returns from fp32

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 0, "eps")
        if self.kind == "rms" and self.affine == "scale_shift":
            raise ConfigError("an RMS norm has no shift; write affine='scale' (or 'none')")


# -- attention and feed-forward -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    heads: int
    kv_heads: int | None = None  # None: one per query head
    head_dim: int | None = None  # None: width / heads
    value_dim: int | None = None  # None: head_dim
    bias: str = "qkvo"  # the projections that carry a bias, letters of q, k, v, o
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    mask: Literal["causal", "prefix", "full"] = "causal"
    window: int | None = None  # sees places closer than this, itself included
    global_tokens: bool = False  # flagged tokens see and are seen beyond the window (Longformer)
    random_blocks: int = 0  # so many random blocks beyond the window (BigBird)
    block_size: int = 64
    random_seed: int = 0  # which random blocks
    positions: Rotary | Alibi | Buckets | None = None
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "each_head", "width"] = "head"  # one weight, one a head, or across all heads
    softcap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    clip: float | None = None  # queries, keys and values clamped to +-clip (OLMo, MPT)
    sinks: bool = False  # a learned score a head that takes weight and gives nothing (gpt-oss)
    kept_heads: tuple[int, ...] = ()  # after pruning: which of the heads there once were; () is all
    unpruned_heads: int | None = None  # how many there once were, where positions give each head its own bias
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "heads", "kv_heads", "head_dim", "value_dim", "window", "block_size")
        check_at_least(self, 0, "random_blocks")
        check_positive(self, "scale", "softcap", "clip")
        check_fraction(self, "dropout")
        if self.heads % self.groups:
            fix = nearest_divisor(self.heads, self.groups)
            raise ConfigError(f"kv_heads={self.groups} does not divide heads={self.heads}; try kv_heads={fix}")
        if set(self.bias) - set("qkvo") or len(set(self.bias)) != len(self.bias):
            raise ConfigError(f"bias={self.bias!r} names projections by letters of 'qkvo', each once; '' is none")
        named = set(self.kept_heads)
        if named and (len(named) != self.heads or not named <= set(range(self.all_heads))):
            raise ConfigError(f"kept_heads={self.kept_heads} must name {self.heads} of {self.all_heads} unpruned heads")
        if self.window is None and (self.global_tokens or self.random_blocks):
            raise ConfigError("global tokens and random blocks reach beyond a window; write window=… too")
        if self.window is not None and self.mask == "prefix":
            raise ConfigError("a window cannot go with mask='prefix', whose prefix is seen whole; write mask='causal'")

    @property
    def groups(self) -> int:
        """G, the key/value heads."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def all_heads(self) -> int:
        """The heads before any were pruned."""
        return self.unpruned_heads if self.unpruned_heads is not None else self.heads

    def key_size(self, width: int) -> int:
        """K, the size of a query or key head."""
        return self.head_dim if self.head_dim is not None else width // self.heads

    def value_size(self, width: int) -> int:
        """The size of a value head."""
        return self.value_dim if self.value_dim is not None else self.key_size(width)

    def check_width(self, width: int) -> None:
        if self.head_dim is None and width % self.heads:
            fix = nearest_divisor(width, self.heads)
            raise ConfigError(f"heads={self.heads} does not divide width={width}; try heads={fix}, or give head_dim")
        if isinstance(self.positions, Rotary):
            turned, size = self.positions.dim, self.key_size(width)
            self._check_factors(self.positions, turned if turned is not None else size)
            if turned is None and size % 2:
                raise ConfigError(f"rotary positions turn pairs, but the head size is {size}; make it even")
            if turned is not None and turned > size:
                raise ConfigError(f"rotary dim={turned} is larger than the head size {size}; write dim={size // 2 * 2}")

    def _check_factors(self, rotary: Rotary, turned: int) -> None:
        scaling = rotary.scaling
        if scaling is not None and scaling.kind == "longrope":
            counts = {len(scaling.short_factors), len(scaling.long_factors)}
            if counts != {turned // 2}:
                raise ConfigError(
                    f"longrope needs {turned // 2} short and long factors, one a pair, not {sorted(counts)}"
                )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    count: int
    top_k: int = 2
    router: Literal["softmax_renormalized", "softmax", "top_k_softmax"] = "softmax_renormalized"
    router_bias: bool = False

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "count", "top_k")
        if self.top_k > self.count:
            raise ConfigError(f"top_k={self.top_k} of {self.count} experts cannot be; write top_k={self.count} or less")


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    hidden: int
    activation: Activation = "gelu"
    gated: bool = False  # down(act(gate(x)) * up(x)): GLU, SwiGLU, GeGLU by the activation
    clamp: float | None = None  # gated: gate and up are kept within this, and one is added to up (gpt-oss)
    bias: bool = True
    dropout: float = 0.0
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "hidden")
        check_fraction(self, "dropout")
        check_positive(self, "clamp")
        if self.clamp is not None and not self.gated:
            raise ConfigError("clamp is for gated feed-forwards; write gated=True, or drop it")


# -- input and head --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    kind: Literal["tokens"] = "tokens"
    vocab: int
    context: int | None = None  # the longest sequence trained on; learned positions allow no more
    dim: int | None = None  # smaller than the width: factorised, then projected (ALBERT, ELECTRA)
    projection: Literal["last", "first"] = "last"  # after positions and norm (ALBERT), or before them (OPT-350m)
    projection_bias: bool = True
    scale: float | Literal["sqrt_width"] = 1.0
    positions: Learned | Sinusoid | None = None
    segments: int = 0  # token types; 0: none
    norm: NormConfig | None = None
    dropout: float = 0.0
    word_dropout: float = 0.0  # of whole words, everywhere in them at once (Gal and Ghahramani 2016)

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "vocab", "context", "dim")
        check_at_least(self, 0, "segments")
        check_fraction(self, "dropout", "word_dropout")
        if isinstance(self.positions, Learned) and self.context is None:
            raise ConfigError("learned positions need context, the number of places to learn")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for tokens")


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    kind: Literal["patches"] = "patches"
    image: int  # height and width of the image
    patch: int
    channels: int = 3
    class_token: bool = True
    distillation_token: bool = False  # a second token with a place of its own, which a teacher's head reads (DeiT)
    registers: int = 0  # further learned tokens in front
    mask_token: bool = False  # a learned vector in the place of patches that are flagged (DINOv2)
    bias: bool = True
    positions: Learned | Sinusoid | None = Learned()
    norm: NormConfig | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "image", "patch", "channels")
        check_at_least(self, 0, "registers")
        check_fraction(self, "dropout")
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("patches are counted from 0; write positions=Learned() without an offset")
        if self.distillation_token and not self.class_token:
            raise ConfigError("a distillation token stands behind a class token; write class_token=True")
        if self.image % self.patch:
            fix = nearest_divisor(self.image, self.patch)
            raise ConfigError(f"patch={self.patch} does not divide image={self.image}; try patch={fix}")

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.first + self.registers

    @property
    def places(self) -> int:
        """Tokens that have a position: class and distillation token and the patches; registers have none."""
        return (self.image // self.patch) ** 2 + self.first

    @property
    def first(self) -> int:
        """Tokens in front that have a position."""
        return int(self.class_token) + int(self.distillation_token)

    @property
    def context(self) -> int:
        return self.places + self.registers


@dataclass(frozen=True, kw_only=True)
class FramesConfig:
    """Sound as frames of features: two convolutions over three frames each, the second of which halves their number."""

    kind: Literal["frames"] = "frames"
    channels: int  # features of a frame
    context: int  # places after the second convolution
    positions: Learned | Sinusoid | None = Learned()
    norm: NormConfig | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "channels", "context")
        check_fraction(self, "dropout")
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("frames are counted from 0; write positions=Learned() without an offset")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for frames")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    kind: Literal["language_model", "masked_lm", "classifier", "tagger", "spans", "pooled"]
    classes: int | None = None  # classifier and tagger
    bias: Literal["none", "learned", "fixed"] = "none"  # fixed: stored, not trained (BART's final_logits_bias)
    pooling: Literal["first", "last", "mean"] = "first"
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"  # a dense layer and this on the pooled vector (BERT)
    normalize: bool = False  # pooled vectors of length one
    project: int | None = None  # pooled vectors turned into so many numbers, without a bias (CLIP)
    teacher: bool = False  # classifier: a second one reads the distillation token, and both are averaged (DeiT)
    transform: Activation | None = None  # masked LM: dense, activation, norm before the output
    transform_bias: bool = True
    norm: NormConfig | None = None
    scale: float | Literal["inverse_sqrt_width"] = 1.0  # on the logits (T5, Cohere, Granite)
    softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "classes", "project")
        check_positive(self, "softcap")
        check_fraction(self, "dropout")
        pools = self.kind in ("classifier", "pooled")
        if not pools and (self.pooling != "first" or self.pooler != "none"):
            raise ConfigError(f"a {self.kind} head answers for each token and pools nothing; drop pooling and pooler")
        if self.kind == "pooled" and (self.scale != 1.0 or self.softcap is not None or self.bias != "none"):
            raise ConfigError("a pooled head has no logits; drop scale, softcap and bias")
        if self.project is not None and (self.kind != "pooled" or self.normalize):
            raise ConfigError(f"project={self.project} is for a pooled head without normalize=True; drop one of them")
        if self.teacher and (self.kind != "classifier" or self.pooling != "first" or self.pooler != "none"):
            raise ConfigError("teacher=True goes with a classifier that reads the first token; drop it")
        if self.kind != "pooled" and self.normalize:
            raise ConfigError(f"normalize=True is for pooled vectors, not for a {self.kind} head; drop it")
        if (self.kind in ("classifier", "tagger")) != (self.classes is not None):
            raise ConfigError(
                f"head kind={self.kind!r} with classes={self.classes} cannot be: classes go with classifier and tagger"
            )


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    kind: Literal["normal", "xavier", "t5", "small"] = "normal"
    std: float = 0.02

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 0, "std")
