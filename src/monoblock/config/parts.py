"""The configurations of the parts of a model, and the upper bounds of their sizes.

Position schemes and inputs are one class each, and `kind` tells them apart in JSON.  Values that depend on the width of
the model are methods that take the width as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from monoblock.config.schema import (
    check_at_least,
    check_at_most,
    check_fraction,
    check_positive,
    check_types,
    nearest_divisor,
    shorten_int,
    within,
)
from monoblock.errors import ConfigError

# Upper bounds of sizes, far above those of every published model.  They catch slips and damaged or hostile files before
# anything of such a size is allocated.
MAX_CONTEXT = 2**26  # tokens; Llama 4 has 10,485,760
MAX_POSITION_WEIGHTS = 2**20  # positions with a learned vector each
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20  # also of embeddings and heads
MAX_HIDDEN = 2**23  # of a feed-forward network
MAX_HEADS = 2**16
MAX_EXPERTS = 2**16
MAX_CLASSES = 2**24
MAX_IMAGE = 2**16  # pixels in a row, and channels
MAX_BUCKETS = 2**20
MAX_LAYERS = 100_000


# -- positions: Learned and Sinusoid are added to the embedding, Rotary, Alibi and Buckets act inside attention --------


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of rotary frequencies for contexts longer than the one trained on."""

    # how the frequencies are scaled
    kind: Literal["linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    factor: float = 1.0  # how many times longer the context becomes
    original_context: Annotated[int | None, within(1, MAX_CONTEXT)] = None  # the context that the model was trained on
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
        if self.factor <= 0:
            raise ConfigError(f"scaling factor={self.factor} must be positive; 1.0 leaves the frequencies alone")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """RoPE (Su et al. 2021): rotate pairs of query and key features by an angle proportional to the position."""

    kind: Literal["rotary"] = "rotary"  # the name of this scheme in JSON
    base: float = 10000.0  # the largest wavelength is about 2 pi times this
    dim: Annotated[int | None, within(high=MAX_WIDTH)] = None  # features of the head that are rotated; None: all
    layout: Literal["half", "interleaved"] = "half"  # pairs (i, i + K/2) or (2i, 2i + 1)
    scaling: Scaling | None = None  # scaling for longer contexts; None: not scaled

    bias, table_rows, shared = "", 0, False  # as in Buckets

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"rotary base={self.base} must be above 1; 10000.0 is usual")
        if self.dim is not None and (self.dim < 2 or self.dim % 2):
            raise ConfigError(
                f"rotary dim={self.dim} must be even, because pairs are rotated; write {max(2, self.dim + 1)}"
            )

    @property
    def label(self) -> str:
        part = f" of {self.dim} features" if self.dim is not None else ""
        return f"rotary positions{part}" + (f", {self.scaling.kind}" if self.scaling else "")


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """ALiBi (Press et al. 2022): a linear penalty on distance, with one slope for each head."""

    kind: Literal["alibi"] = "alibi"  # the name of this scheme in JSON
    form: Literal["distance", "falcon"] = "distance"  # falcon: slope * key position in bf16, scaled like the scores
    max_bias: float = 8.0  # the smallest slope is 2 to the power of minus this

    label, bias, table_rows, shared = "ALiBi positions", "− slope · distance", 0, False  # as in Buckets

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A learned bias for each head and bucket of distances (T5); if `shared`, all blocks of a stack use one table."""

    kind: Literal["buckets"] = "buckets"  # the name of this scheme in JSON
    count: Annotated[int, within(4, MAX_BUCKETS)] = 32  # number of buckets
    max_distance: Annotated[int, within(high=MAX_CONTEXT)] = 128  # all larger distances share a bucket
    shared: bool = True  # whether all blocks of a stack use one table

    bias = "+ bias of the distance's bucket"  # what is added to the scores, in words; "": nothing

    def __post_init__(self) -> None:
        check_types(self)
        half = self.count // 2
        if self.max_distance <= half:
            raise ConfigError(
                f"max_distance={self.max_distance} must exceed half of count={self.count}; write {half + 1} or more"
            )

    @property
    def label(self) -> str:
        """What a drawing says."""
        return f"relative positions, {self.count} buckets"

    @property
    def table_rows(self) -> int:
        """The number of learned biases of each head."""
        return self.count


@dataclass(frozen=True, kw_only=True)
class Sinusoid:
    """Fixed sines and cosines added to the embedding (Vaswani et al. 2017, 3.5)."""

    kind: Literal["sinusoid"] = "sinusoid"  # the name of this scheme in JSON
    form: Literal["interleaved", "halves", "fairseq", "grid"] = "interleaved"  # grid: rows and columns of an image
    base: float = 10000.0  # the largest wavelength is about 2 pi times this
    offset: Annotated[int, within(high=MAX_CONTEXT)] = 0  # the first position

    label = "sinusoids"

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            raise ConfigError(f"sinusoid base={self.base} must be above 1; 10000.0 is usual")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A learned vector for each position up to the context; the first `offset` rows of the table are unused."""

    kind: Literal["learned"] = "learned"  # the name of this scheme in JSON
    # number of unused rows at the start of the table (BART)
    offset: Annotated[int, within(0, MAX_POSITION_WEIGHTS)] = 0

    label = "learned positions"

    def __post_init__(self) -> None:
        check_types(self)


PositionScheme = Literal["none", "sinusoid", "learned", "rotary", "alibi", "buckets"]
AttentionPositions = Rotary | Alibi | Buckets


class PositionRow(NamedTuple):
    added: Learned | Sinusoid | None = None  # to the embedding
    inside: AttentionPositions | None = None  # attention
    paper: str = ""


POSITION_SCHEMES: dict[PositionScheme, PositionRow] = {
    "none": PositionRow(),
    "sinusoid": PositionRow(added=Sinusoid(), paper="Vaswani et al. 2017"),
    "learned": PositionRow(added=Learned(), paper="Gehring et al. 2017"),
    "rotary": PositionRow(inside=Rotary(), paper="Su et al. 2021"),
    "alibi": PositionRow(inside=Alibi(), paper="Press et al. 2022"),
    "buckets": PositionRow(inside=Buckets(), paper="Raffel et al. 2020"),
}


CheckpointMode = bool | Literal["selective"]  # activation checkpointing; nn/activation_checkpointing.py explains it

# Sets of head kinds (HeadConfig.kind).
VOCABULARY_HEADS = ("language_model", "masked_lm")  # logits over the vocabulary
HEADS_WITH_CLASSES = ("classifier", "tagger", "regression")  # `classes` outputs
SEQUENCE_HEADS = ("classifier", "regression", "pooled")  # one output for a sequence, after pooling


# -- kinds of norms and activations: a row each, which configuration, knobs and accounting read -----------------------

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh", "identity"]
NormKind = Literal["layer", "rms", "batch", "none"]


class ActivationRow(NamedTuple):
    """What a nonlinearity is called and what it saves for the backward pass; nn/feedforward.py computes it."""

    label: str  # in drawings
    tensors: int  # that only it saves
    saves_output: bool = False  # as the next layer does too
    paper: str = ""


class NormRow(NamedTuple):
    """What a norm is called, what it has and what it saves for the backward pass; nn/norm.py computes it."""

    label: str  # in drawings
    affine: tuple[str, ...]  # the learned vectors that it can have, the usual ones first
    has_running_statistics: bool = False  # averages over batches, stored with the weights
    tensors: int = 1  # of the size of its input that it saves
    saves_normalized: bool = False  # one more, the normalized input, if this has 16 bits
    paper: str = ""


ACTIVATION_ROWS: dict[Activation, ActivationRow] = {
    "relu": ActivationRow("ReLU", 0, saves_output=True, paper="Vaswani et al. 2017"),
    "relu2": ActivationRow("ReLU²", 1, paper="So et al. 2021"),
    "gelu": ActivationRow("GELU", 1, paper="Hendrycks and Gimpel 2016"),
    "gelu_tanh": ActivationRow("GELU (tanh)", 1),
    "quick_gelu": ActivationRow("quick GELU", 2),
    "silu": ActivationRow("SiLU", 1, paper="Ramachandran et al. 2017"),
    "sigmoid": ActivationRow("sigmoid", 0, saves_output=True),
    "tanh": ActivationRow("tanh", 0, saves_output=True),
    "identity": ActivationRow("identity", 0),
}
NORM_ROWS: dict[NormKind, NormRow] = {
    "layer": NormRow("LayerNorm", ("scale_shift", "scale", "none"), paper="Ba et al. 2016"),
    "rms": NormRow("RMSNorm", ("scale", "none"), saves_normalized=True, paper="Zhang and Sennrich 2019"),
    "batch": NormRow("BatchNorm", ("scale_shift", "scale", "none"), True, paper="Ioffe and Szegedy 2015"),
    "none": NormRow("no norm", ("none",), tensors=0),
}


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """A norm, or none."""

    kind: NormKind = "layer"  # what is computed; batch: statistics over all rows and positions; none: nothing
    eps: Annotated[float, within(0)] = 1e-5  # added to the variance or to the mean square
    # which learned vectors are applied after normalization
    affine: Literal["scale_shift", "scale", "none"] = "scale_shift"
    unit_offset: bool = False  # the scale is 1 + weight (Gemma, Nemotron)
    cast: Literal["before_scale", "after_scale"] = "before_scale"  # where 16-bit input is cast back from fp32

    def __post_init__(self) -> None:
        check_types(self)
        if self.affine not in self.row.affine:
            choices = " or ".join(map(repr, self.row.affine))
            raise ConfigError(f"a norm of kind {self.kind!r} has no affine={self.affine!r}; write affine={choices}")

    @property
    def row(self) -> NormRow:
        """What this kind of norm is."""
        return NORM_ROWS[self.kind]


# -- attention and feed-forward -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Self- or cross-attention."""

    # "softmax": weights are a softmax of the scores; "linear": products of features, in time linear in the length
    kind: Literal["softmax", "linear"] = "softmax"
    heads: Annotated[int, within(1, MAX_HEADS)]  # H, the number of query heads
    # G, the number of key/value heads; None: one per query head
    kv_heads: Annotated[int | None, within(1, MAX_HEADS)] = None
    # K, the size of a query and key head; None: width / heads
    head_dim: Annotated[int | None, within(1, MAX_WIDTH)] = None
    value_dim: Annotated[int | None, within(1, MAX_WIDTH)] = None  # size of a value head; None: head_dim
    bias: str = "qkvo"  # the projections with a bias, letters of q, k, v, o
    scale: Annotated[float | None, check_positive] = None  # factor on the scores; None: 1 / sqrt(head_dim)
    # "causal": a token sees itself and earlier tokens; "prefix": also the whole prefix; "full": all tokens
    mask: Literal["causal", "prefix", "full"] = "causal"
    # a token sees keys closer than this, itself included; no faster with ALiBi or buckets
    window: Annotated[int | None, within(1, MAX_CONTEXT)] = None
    global_tokens: bool = False  # marked tokens attend and are attended beyond the window (Longformer)
    random_blocks: Annotated[int, within(0, MAX_CONTEXT)] = 0  # number of random blocks beyond the window (BigBird)
    block_size: Annotated[int, within(1, MAX_CONTEXT)] = 64  # number of positions in a random block
    random_seed: int = 0  # seed for the choice of random blocks
    positions: AttentionPositions | None = None  # position scheme inside attention
    qk_norm: NormConfig | None = None  # norm of queries and keys
    # "head": all heads share the weights of the norm; "each_head": each has its own; "width": one norm over all heads
    qk_norm_over: Literal["head", "each_head", "width"] = "head"
    softcap: Annotated[float | None, check_positive] = None  # scores become cap * tanh(score / cap) (Gemma 2)
    clip: Annotated[float | None, check_positive] = None  # queries, keys and values clamped to +-clip (OLMo, MPT)
    sinks: bool = False  # for each head a learned extra score in the denominator of the softmax (gpt-oss)
    kept_heads: tuple[int, ...] = ()  # indices of the heads left after pruning; (): all
    # number of heads before pruning, for which position biases are computed
    unpruned_heads: Annotated[int | None, within(high=MAX_HEADS)] = None
    # dropout probability of the attention weights, which linear attention does not compute
    dropout: Annotated[float, check_fraction] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.heads % self.num_kv_heads:
            fix = nearest_divisor(self.heads, self.num_kv_heads)
            raise ConfigError(f"kv_heads={self.num_kv_heads} does not divide heads={self.heads}; try kv_heads={fix}")
        if set(self.bias) - set("qkvo") or len(set(self.bias)) != len(self.bias):
            raise ConfigError(
                f"bias={self.bias!r} does not name projections; write letters of 'qkvo' for those with a bias, "
                "each once, or '' for none"
            )
        kept = set(self.kept_heads)
        if kept and (len(kept) != self.heads or not kept <= set(range(self.num_unpruned_heads))):
            raise ConfigError(
                f"kept_heads={self.kept_heads} must be {self.heads} different indices below {self.num_unpruned_heads}, "
                "the number of heads before pruning"
            )
        if self.window is None and self.sees_beyond_window:
            raise ConfigError("global_tokens and random_blocks reach beyond a window; write window=… too, or drop them")
        if self.window is not None and self.mask == "prefix":
            raise ConfigError(
                "a window cannot be combined with mask='prefix', with which every token sees the whole prefix; "
                "write window=None or mask='causal'"
            )
        if self.kind == "linear":
            self._check_linear()

    def _check_linear(self) -> None:
        """Raise ConfigError if linear attention is combined with an option of the scores, which it does not compute."""
        if self.mask == "prefix":
            raise ConfigError("linear attention has no prefix mask; write mask='causal', or kind='softmax'")
        if self.positions is not None and self.positions.bias:
            raise ConfigError(
                f"positions {self.positions.kind!r} add a bias to scores, which linear attention does not compute; "
                "write rotary positions, positions of the input, or kind='softmax'"
            )
        options = {name: getattr(self, name) for name in ("window", "scale", "softcap", "sinks")}
        for name, value in options.items():
            if value:
                raise ConfigError(
                    f"{name}={value} acts on scores, which linear attention does not compute; "
                    f"leave {name} out, or write kind='softmax'"
                )

    @property
    def num_kv_heads(self) -> int:
        """G, the number of key/value heads."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def num_unpruned_heads(self) -> int:
        """The number of heads before pruning."""
        return self.unpruned_heads if self.unpruned_heads is not None else self.heads

    @property
    def sees_beyond_window(self) -> bool:
        """Whether global tokens or random blocks let tokens see others that are not in the window."""
        return self.global_tokens or self.random_blocks > 0

    @property
    def cached_window(self) -> int | None:
        """The number of last tokens whose keys a cache keeps; None: those of all tokens, which may be seen again."""
        return None if self.sees_beyond_window else self.window

    @property
    def has_score_bias(self) -> bool:
        """Whether positions add a bias to the scores."""
        return self.positions is not None and self.positions.bias != ""

    def table_rows(self, *, shared: bool) -> int:
        """Return the number of learned position biases of each head, in the table of the stack or in one of its own."""
        positions = self.positions
        return positions.table_rows if positions is not None and positions.shared is shared else 0

    def key_size(self, width: int) -> int:
        """Return K, the size of a query or key head."""
        return self.head_dim if self.head_dim is not None else width // self.heads

    def value_size(self, width: int) -> int:
        """Return the size of a value head."""
        return self.value_dim if self.value_dim is not None else self.key_size(width)

    def check_width(self, width: int) -> None:
        """Raise ConfigError unless heads and rotary positions fit a model of this width."""
        if self.head_dim is None and width % self.heads:
            fix = nearest_divisor(width, self.heads)
            raise ConfigError(f"heads={self.heads} does not divide width={width}; try heads={fix}, or set head_dim")
        if isinstance(self.positions, Rotary):
            dim, size = self.positions.dim, self.key_size(width)
            self._check_longrope_factors(self.positions, dim if dim is not None else size)
            if dim is None and size % 2:
                raise ConfigError(f"rotary positions rotate pairs, but the head size is {size}; make it even")
            if dim is not None and dim > size:
                raise ConfigError(f"rotary dim={dim} is larger than the head size {size}; write dim={size // 2 * 2}")

    def _check_longrope_factors(self, rotary: Rotary, rotary_dim: int) -> None:
        scaling = rotary.scaling
        if scaling is not None and scaling.kind == "longrope":
            short, long, pairs = len(scaling.short_factors), len(scaling.long_factors), rotary_dim // 2
            if (short, long) != (pairs, pairs):
                raise ConfigError(
                    f"longrope scaling has {short} short_factors and {long} long_factors; write {pairs} of each, "
                    "one for each rotated pair"
                )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of one feed-forward network."""

    count: Annotated[int, within(1, MAX_EXPERTS)]  # number of experts
    top_k: Annotated[int, within(1, MAX_EXPERTS)] = 2  # number of experts for each token
    # how experts are weighted: softmax over all, then renormalized or not, or softmax over the chosen ones
    router: Literal["softmax_renormalized", "softmax", "top_k_softmax"] = "softmax_renormalized"
    router_bias: bool = False  # whether the router has a bias

    def __post_init__(self) -> None:
        check_types(self)
        if self.top_k > self.count:
            raise ConfigError(
                f"top_k={self.top_k} is more than count={self.count} experts; write top_k={self.count} or less"
            )


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """The feed-forward network, or each of its experts."""

    hidden: Annotated[int, within(high=MAX_HIDDEN)]  # F, the hidden size; 0: no feed-forward network
    activation: Activation = "gelu"  # the nonlinearity
    gated: bool = False  # down(activation(gate(x)) * up(x)), as in GLU, SwiGLU, GeGLU
    # only if gated: gate and up are clamped to this, and 1 is added to up (gpt-oss)
    clamp: Annotated[float | None, check_positive] = None
    bias: bool = True  # whether the projections have biases
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability after the activation
    experts: ExpertsConfig | None = None  # a mixture of experts; None: a single network

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0 if self.experts is None else 1, "hidden")
        if self.clamp is not None and not self.gated:
            raise ConfigError("clamp is for gated feed-forward networks; write gated=True, or drop clamp")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The layers after the last stack."""

    # what the head predicts
    kind: Literal["language_model", "masked_lm", "classifier", "regression", "tagger", "spans", "pooled"]
    # number of classes of a classifier or tagger, or of numbers that a regression predicts
    classes: Annotated[int | None, within(1, MAX_CLASSES)] = None
    multi_label: bool = False  # classifier: a sequence may have several classes, each with a probability of its own
    bias: Literal["none", "learned", "fixed"] = "none"  # fixed: stored, not trained (final_logits_bias of BART)
    pooling: Literal["first", "last", "mean"] = "first"  # which hidden state represents the sequence
    pooler: Literal["none", "tanh", "relu", "gelu"] = "none"  # activation of a linear layer after pooling (BERT)
    normalize: bool = False  # scale pooled vectors to length one
    # size of a linear projection of pooled vectors, without a bias (CLIP)
    project: Annotated[int | None, within(1, MAX_WIDTH)] = None
    teacher: bool = False  # average with a second classifier on the distillation token (DeiT)
    transform: Activation | None = None  # masked LM: linear layer, activation and norm before the output
    transform_bias: bool = True  # whether the linear layer of `transform` has a bias
    norm: NormConfig | None = None  # norm before the output
    scale: float | Literal["inverse_sqrt_width"] = 1.0  # factor on the logits (T5, Cohere, Granite)
    softcap: Annotated[float | None, check_positive] = None  # logits become cap * tanh(logit / cap) (Gemma 2)
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability before the output

    def __post_init__(self) -> None:
        if self.kind == "regression" and self.classes is None:
            object.__setattr__(self, "classes", 1)
        check_types(self)
        if self.kind not in SEQUENCE_HEADS and (self.pooling != "first" or self.pooler != "none"):
            raise ConfigError(f"a {self.kind} head predicts for each token and pools nothing; drop pooling and pooler")
        if self.kind == "pooled" and (self.scale != 1.0 or self.softcap is not None or self.bias != "none"):
            raise ConfigError("a pooled head has no logits; drop scale, softcap and bias")
        if self.project is not None and (self.kind != "pooled" or self.normalize):
            raise ConfigError(
                f"project={self.project} needs kind='pooled' and normalize=False; write these, or drop project"
            )
        if self.teacher and (self.kind != "classifier" or self.pooling != "first" or self.pooler != "none"):
            raise ConfigError(
                "teacher=True needs kind='classifier', pooling='first' and pooler='none'; write these, or drop teacher"
            )
        if self.multi_label and self.kind != "classifier":
            raise ConfigError(f"multi_label=True is for a classifier, not for a {self.kind} head; drop it")
        if self.kind != "pooled" and self.normalize:
            raise ConfigError(f"normalize=True is for pooled vectors, not for a {self.kind} head; drop it")
        if (self.kind in HEADS_WITH_CLASSES) != (self.classes is not None):
            raise ConfigError(
                f"head kind={self.kind!r} with classes={self.classes} is invalid: classifier and tagger need classes, "
                "a regression head may have them, other heads have none"
            )


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """The initialization scheme of the weights (see nn/initialize.py), and its standard deviation."""

    kind: Literal["normal", "xavier", "t5", "small"] = "normal"  # the scheme
    std: Annotated[float, within(0)] = 0.02  # standard deviation, for the schemes that need one

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One Transformer block."""

    width: Annotated[int, within(1, MAX_WIDTH)]  # D, the size of the hidden states
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
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability of the output of each sublayer

    def __post_init__(self) -> None:
        check_types(self)
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
    times: Annotated[int, within(1, MAX_LAYERS)] = 1  # how often it is repeated
    tied: bool = False  # whether the repetitions share their weights (ALBERT)

    def __post_init__(self) -> None:
        check_types(self)
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
        attentions = [block.attention for block in self.layers()]
        tables = {(a.positions, a.num_unpruned_heads) for a in attentions if a.table_rows(shared=True)}
        if len(tables) > 1:
            raise ConfigError(
                "the blocks of a stack share one table of position buckets, so they need equal Buckets and numbers of "
                "heads; write Buckets(shared=False) to give each block its own"
            )

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


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """A token input: embedding, positions, segments and norm."""

    kind: Literal["tokens"] = "tokens"  # the name of this input in JSON
    vocab: Annotated[int, within(1, MAX_VOCAB)]  # V, the size of the vocabulary
    # length of the longest sequence in training; a limit for learned positions
    context: Annotated[int | None, within(1)] = None
    # size of the token embedding, which is projected to the width (ALBERT); None: the width
    dim: Annotated[int | None, within(1, MAX_WIDTH)] = None
    projection: Literal["last", "first"] = "last"  # project after positions and norm (ALBERT) or before (OPT-350m)
    projection_bias: bool = True  # whether that projection has a bias
    scale: float | Literal["sqrt_width"] = 1.0  # factor on the token embedding
    positions: Learned | Sinusoid | None = None  # positions added to the embedding
    segments: Annotated[int, within(0, MAX_VOCAB)] = 0  # number of token types; 0: none
    norm: NormConfig | None = None  # norm of the embedding
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability of the embedding
    # rate of tokens whose whole embedding is zeroed (cf. Gal and Ghahramani 2016)
    word_dropout: Annotated[float, check_fraction] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        check_at_most(self, MAX_POSITION_WEIGHTS if isinstance(self.positions, Learned) else MAX_CONTEXT, "context")
        if isinstance(self.positions, Learned) and self.context is None:
            raise ConfigError("learned positions need a context, which is the number of positions; write context=…")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for tokens")


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """An image input, cut into patches of patch × patch pixels that become tokens."""

    kind: Literal["patches"] = "patches"  # the name of this input in JSON
    image: Annotated[int, within(1, MAX_IMAGE)]  # height and width of the image in pixels
    patch: Annotated[int, within(1, MAX_IMAGE)]  # height and width of a patch in pixels
    channels: Annotated[int, within(1, MAX_IMAGE)] = 3  # number of colours of a pixel
    class_token: bool = True  # whether a learned token comes before the patches
    distillation_token: bool = False  # a second token with a position, read by the `teacher` head (DeiT)
    registers: Annotated[int, within(0, MAX_IMAGE)] = 0  # additional learned tokens before the patches
    mask_token: bool = False  # a learned vector that replaces marked patches (DINOv2)
    bias: bool = True  # whether the projection of patches has a bias
    positions: Learned | Sinusoid | None = Learned()  # positions added to the embedding
    norm: NormConfig | None = None  # norm of the embedding
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability of the embedding

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("patches are counted from 0; write positions=Learned() without an offset")
        if self.distillation_token and not self.class_token:
            raise ConfigError("a distillation token comes after a class token; write class_token=True")
        if self.image % self.patch:
            fix = nearest_divisor(self.image, self.patch)
            raise ConfigError(f"patch={self.patch} does not divide image={self.image}; try patch={fix}")
        if self.num_positions > MAX_POSITION_WEIGHTS:
            raise ConfigError(
                f"image={self.image} with patch={self.patch} is {self.num_positions} tokens; write a larger patch, for "
                f"at most {MAX_POSITION_WEIGHTS} tokens"
            )

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches: class token, distillation token and registers."""
        return self.num_class_tokens + self.registers

    @property
    def num_positions(self) -> int:
        """The number of tokens with a position: class token, distillation token and patches, but not registers."""
        return (self.image // self.patch) ** 2 + self.num_class_tokens

    @property
    def num_class_tokens(self) -> int:
        """The number of class and distillation tokens, which have positions."""
        return int(self.class_token) + int(self.distillation_token)

    @property
    def context(self) -> int:
        return self.num_positions + self.registers


@dataclass(frozen=True, kw_only=True)
class FramesConfig:
    """An audio input: two convolutions over three frames each, the second with stride two (Whisper)."""

    kind: Literal["frames"] = "frames"  # the name of this input in JSON
    channels: Annotated[int, within(1, MAX_IMAGE)]  # features of a frame
    context: Annotated[int, within(1, MAX_POSITION_WEIGHTS)]  # positions after the second convolution
    positions: Learned | Sinusoid | None = Learned()  # positions added to the embedding
    norm: NormConfig | None = None  # norm of the embedding
    dropout: Annotated[float, check_fraction] = 0.0  # dropout probability of the embedding

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.positions, Learned) and self.positions.offset:
            raise ConfigError("frames are counted from 0; write positions=Learned() without an offset")
        if isinstance(self.positions, Sinusoid) and self.positions.form == "grid":
            raise ConfigError("form='grid' is for images; write 'interleaved', 'halves' or 'fairseq' for frames")
