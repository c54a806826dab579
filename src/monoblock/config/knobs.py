"""Change some choices of a configuration and keep the rest: `vary(config, norm="rms", kv_heads=2)`.

A knob is a short name for a field somewhere inside a ModelConfig; KNOBS maps it to the classes that have this field and
the function that sets it. All knobs of a call are set in one pass, inner parts first, so that values that must agree
(width and heads, window and random_blocks) are validated together, in any order. Family constructors, recipes and the
command line use these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from monoblock.config.field_description import REQUIRED, allows_none, describe_fields, list_choices
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Repeat,
    Rotary,
    Sinusoid,
    StackConfig,
)
from monoblock.config.parts import (
    ACTIVATION_ROWS,
    HEADS_WITH_CLASSES,
    MAX_LAYERS,
    NORM_ROWS,
    POSITION_SCHEMES,
    Activation,
    ActivationRow,
    AttentionPositions,
    NormKind,
    NormRow,
    PositionScheme,
    Scaling,
)
from monoblock.config.schema import shorten_int
from monoblock.errors import ConfigError, did_you_mean, with_article

EncoderHead = Literal["pooled", "masked_lm", "classifier", "regression", "tagger", "spans", "none"]


class StyleKnobs(TypedDict, total=False):
    """The knobs that are not a named parameter of any family constructor."""

    segments: int  # number of token types that are embedded; 0: none
    embedding_scale: float | Literal["sqrt_width"]  # factor on the token embedding; sqrt_width with sinusoid positions
    embedding_norm: bool  # normalize the embedding
    class_token: bool  # put a learned token before the image patches
    attention: Literal["softmax", "linear"]  # weights by a softmax of scores, or by products of features (linear time)
    kv_heads: int | None  # number of key/value heads, which query heads share; None: one per query head
    value_dim: int | None  # size of a value head; None: head_dim
    scale: float | None  # factor on the attention scores; None: 1 / sqrt(head_dim); 1: not scaled
    softcap: float | None  # attention scores become cap * tanh(score / cap); None: no cap
    mask: Literal["causal", "prefix", "full"]  # a token sees earlier tokens, also the whole prefix, or all tokens
    window: int | None  # a token sees only keys closer than this; None: all that the mask allows
    global_tokens: bool  # tokens that flags mark, by default the first, see and are seen beyond the window
    random_blocks: int  # number of random earlier blocks that each block of positions sees beyond the window
    block_size: int  # number of positions in a random block
    qk_norm: bool  # normalize queries and keys
    positions: PositionScheme  # how positions are encoded
    rotary_base: float  # base of the rotary wavelengths
    rotary_dim: int | None  # number of features of a head that are rotated; None: all
    scaling: Scaling | None  # scaling of rotary frequencies for longer contexts; None: not scaled
    activation: Activation  # nonlinearity of the feed-forward network
    gated: bool  # multiply the activation by a second projection (GLU, SwiGLU, GeGLU)
    experts: int  # number of experts in each feed-forward network; without this knob there are none
    top_k: int  # number of experts for each token
    norm: NormKind  # LayerNorm, RMSNorm, BatchNorm over rows and positions, or no norm
    eps: float  # added to the variance or mean square in a norm
    norm_place: Literal["pre", "post", "output", "sandwich"]  # where a sublayer is normalized
    residual: Literal["sequential", "parallel", "parallel_shared", "none"]  # how sublayers are added; none: not
    bias: bool  # biases in attention and feed-forward projections
    dropout: float  # dropout probability everywhere except in the head
    attention_dropout: float  # dropout probability of the attention weights; overrides dropout
    embedding_dropout: float  # dropout probability of the embedding; overrides dropout
    word_dropout: float  # probability that the whole embedding of a token is set to zero
    head_dropout: float  # dropout probability in the head
    pooling: Literal["first", "last", "mean"]  # which hidden state represents the sequence
    pooler: Literal["none", "tanh", "relu", "gelu"]  # activation of a linear layer after pooling
    tie: Literal["none", "output", "source_target", "three_way"]  # which embeddings and output share a matrix
    init: Literal["normal", "xavier", "t5", "small"]  # how the weights are initialized
    std: float  # standard deviation of the initialization


class HeadSizeKnobs(StyleKnobs, total=False):
    """The knobs of a family whose constructor has `hidden`, but not `head_dim`."""

    head_dim: int | None  # size of a query and key head; None: width / heads


class SizeKnobs(HeadSizeKnobs, total=False):
    """The knobs of a family whose constructor has neither `hidden` nor `head_dim`."""

    hidden: int  # hidden size of the feed-forward network; 0: no feed-forward network


class Knobs(SizeKnobs, total=False):
    """All knobs."""

    vocab: int  # size of the vocabulary
    context: int | None  # length of the longest sequence; a limit for learned positions
    image: int  # height and width of an image in pixels
    patch: int  # height and width of a patch in pixels
    channels: int  # number of colour channels of an image
    width: int  # size of the hidden states; hidden is scaled with it, unless it is given too
    depth: int  # number of blocks, in the encoder and in the decoder
    heads: int  # number of query heads
    head: EncoderHead  # the head of an encoder; a decoder can have classifier, regression and none
    classes: int  # number of outputs of a classifier, tagger or regression head


def check_positive_int(name: str, value: Any) -> int:
    """Return `value` if it is a positive whole number, else raise a ConfigError that calls it `name`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a positive whole number; write 1 or more")
    return value


def resize_pattern(pattern: tuple[Repeat, ...], depth: int) -> tuple[Repeat, ...]:
    """Cut a pattern to `depth` blocks, or repeat its last entry until it has `depth` blocks."""
    check_positive_int("depth", depth)
    if depth > MAX_LAYERS:
        raise ConfigError(f"depth={shorten_int(depth)} is too large; write {MAX_LAYERS} or less")
    runs: list[Repeat] = []
    left = depth
    for number, run in enumerate(pattern, start=1):
        times, rest = divmod(left, len(run.blocks))
        is_last = number == len(pattern) or times < run.times or (times == run.times and not rest)
        if not is_last:
            runs.append(run)
            left -= run.times * len(run.blocks)
            continue
        if times:
            runs.append(replace(run, times=times))
        if rest and run.tied:
            size = len(run.blocks)
            fix = depth - rest or size
            raise ConfigError(f"depth={depth} would cut a group of {size} blocks with tied weights; write depth={fix}")
        if rest:
            runs.append(Repeat(blocks=run.blocks[:rest]))
        break
    return tuple(runs)


# The arguments from which a part of a configuration is rebuilt. In those of a block, "attention" and "cross" are such
# arguments themselves until all knobs are set, so that a knob may set a field of self-attention alone.
FieldValues = dict[str, Any]
ConfigT = TypeVar("ConfigT")


def rebuild(config: ConfigT, edit: Callable[[Any, FieldValues], None]) -> ConfigT:
    """Copy a configuration, calling `edit(part, values)` for each of its dataclasses, the innermost first.

    `values` are the fields of the copy, which `edit` may change; `part` is the original.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        return rebuild(value, edit) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value

    values = {f.name: walk(getattr(config, f.name)) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    edit(config, values)
    return type(config)(**values)


@dataclasses.dataclass(frozen=True)
class SetField:
    """A function that sets the field `name`."""

    name: str

    def __call__(self, part: Any, values: FieldValues, value: Any) -> None:
        values[self.name] = value


@dataclasses.dataclass(frozen=True)
class SetSelfAttention:
    """A function that sets the field `name` of self-attention and leaves cross-attention unchanged."""

    name: str

    def __call__(self, part: BlockConfig, values: FieldValues, value: Any) -> None:
        values["attention"][self.name] = value


def _scale_hidden(block: BlockConfig, values: FieldValues) -> None:
    """Scale the hidden size of the feed-forward network by the same factor as the width."""
    width = check_positive_int("width", values["width"])
    if not block.feedforward.hidden:
        return
    hidden = max(1, round(Fraction(block.feedforward.hidden * width, block.width)))
    values["feedforward"] = dataclasses.replace(values["feedforward"], hidden=hidden)


def _set_depth(stack: StackConfig, values: FieldValues, depth: int) -> None:
    values["pattern"] = resize_pattern(values["pattern"], depth)


def _set_norm_kind(part: NormConfig, values: FieldValues, kind: str) -> None:
    if kind != part.kind:
        values["kind"] = kind
        if kind in NORM_ROWS:  # else NormConfig names the kinds
            values["affine"] = NORM_ROWS[kind].affine[0]


def _set_final_norm(stack: StackConfig, values: FieldValues, norm_place: str) -> None:
    """Remove the norm after the last block if the blocks are post-norm, since these end with one; else add it."""
    values["norm"] = None if norm_place == "post" else values["norm"] or values["pattern"][0].blocks[0].norm


def _look_up_positions(positions: str) -> tuple[Learned | Sinusoid | None, AttentionPositions | None]:
    if not isinstance(positions, str) or positions not in POSITION_SCHEMES:
        raise ConfigError(
            f"positions={positions!r} is not one of {', '.join(POSITION_SCHEMES)}"
            f"{did_you_mean(str(positions), POSITION_SCHEMES)}"
        )
    return POSITION_SCHEMES[positions]


def _set_input_positions(part: EmbeddingConfig | PatchConfig, values: FieldValues, positions: str) -> None:
    """Set the positions that are added to the input; for image patches, sinusoids encode row and column."""
    scheme = _look_up_positions(positions)[0]
    is_grid = isinstance(part, PatchConfig) and isinstance(scheme, Sinusoid)
    values["positions"] = Sinusoid(form="grid") if is_grid else scheme


def _set_attention_positions(part: BlockConfig, values: FieldValues, positions: str) -> None:
    values["attention"]["positions"] = _look_up_positions(positions)[1]


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not true or false")


def _set_bias(part: AttentionConfig | FeedForwardConfig, values: FieldValues, bias: bool) -> None:
    _check_bool("bias", bias)
    values["bias"] = ("qkvo" if bias else "") if isinstance(part, AttentionConfig) else bias


def _set_experts(part: FeedForwardConfig, values: FieldValues, count: int) -> None:
    check_positive_int("experts", count)
    top_k = part.experts.top_k if part.experts else min(2, count)
    values["experts"] = dataclasses.replace(part.experts or ExpertsConfig(count=count, top_k=top_k), count=count)


def _set_qk_norm(part: BlockConfig, values: FieldValues, enabled: bool) -> None:
    _check_bool("qk_norm", enabled)
    values["attention"]["qk_norm"] = values["norm"] if enabled else None


def _set_embedding_norm(part: ModelConfig, values: FieldValues, enabled: bool) -> None:
    """Add a norm like that of the blocks to every token embedding without one, or remove the norms if not `enabled`."""
    _check_bool("embedding_norm", enabled)
    norm = (values["encoder"] or values["decoder"]).pattern[0].blocks[0].norm
    for side in ("input", "target"):
        if isinstance(values[side], EmbeddingConfig):
            values[side] = dataclasses.replace(values[side], norm=(values[side].norm or norm) if enabled else None)


def build_encoder_head(head: str, classes: int | None, norm: NormConfig) -> HeadConfig | None:
    """Build the usual head of kind `head`, or None for "none".

    By default a classifier or tagger has two classes, and a regression head gives one number.
    """
    num_classes = 2 if classes is None else classes
    heads: dict[str, Callable[[], HeadConfig | None]] = {
        "pooled": lambda: HeadConfig(kind="pooled", pooler="tanh"),
        "masked_lm": lambda: HeadConfig(kind="masked_lm", transform="gelu", norm=norm, bias="learned"),
        "classifier": lambda: HeadConfig(kind="classifier", classes=num_classes, pooler="tanh", bias="learned"),
        "regression": lambda: HeadConfig(kind="regression", classes=classes, pooler="tanh", bias="learned"),
        "tagger": lambda: HeadConfig(kind="tagger", classes=num_classes, bias="learned"),
        "spans": lambda: HeadConfig(kind="spans", bias="learned"),
        "none": lambda: None,
    }
    if not isinstance(head, str) or head not in heads:
        raise ConfigError(f"head={head!r} is not one of {', '.join(heads)}{did_you_mean(str(head), heads)}")
    if classes is not None and head not in HEADS_WITH_CLASSES:
        kinds = ", ".join(HEADS_WITH_CLASSES)
        raise ConfigError(f"classes={classes} is only for the heads {kinds}, not for head={head!r}; leave it out")
    return heads[head]()


def _build_decoder_head(head: str) -> HeadConfig | None:
    """Build the head of kind `head` that published decoders have: it reads the last token, which sees the others."""
    heads: dict[str, HeadConfig | None] = {
        "classifier": HeadConfig(kind="classifier", classes=2, pooling="last"),
        "regression": HeadConfig(kind="regression", pooling="last", classes=1),
        "none": None,
    }
    if not isinstance(head, str) or head not in heads:
        raise ConfigError(f"head={head!r} is not one of {', '.join(heads)}, which a decoder can have; leave it out")
    return heads[head]


def _set_head(part: ModelConfig, values: FieldValues, head: str) -> None:
    """Give an encoder or a decoder the usual head of kind `head`, unless its head has this kind already."""
    if part.family == "encoder-decoder":
        raise ConfigError(f"head={head!r} is for an encoder or a decoder, not for an encoder-decoder; leave it out")
    if head == (part.head.kind if part.head else "none"):
        return
    if part.family == "decoder-only":
        values["head"], values["tie"] = _build_decoder_head(head), "none"
    else:
        values["head"] = build_encoder_head(head, None, values["encoder"].pattern[0].blocks[0].norm)
        values["tie"] = "output" if head == "masked_lm" else "none"


KnobSetter = tuple[tuple[type, ...], Callable[[Any, FieldValues, Any], None]]
NO_PAPER = "—"


class Knob(NamedTuple):
    """What a knob sets: classes that have the field, each with the function that sets it there; and its paper."""

    setters: tuple[KnobSetter, ...]
    paper: str = NO_PAPER  # if papers differ by value, each begins with the value


def set_field(name: str, *classes: type, paper: str = NO_PAPER) -> Knob:
    """Return a knob that sets the field `name` of every part of these classes."""
    return Knob(((classes, SetField(name)),), paper)


def set_self_attention(name: str, paper: str) -> Knob:
    """Return a knob that sets the field `name` of self-attention and leaves cross-attention unchanged."""
    return Knob((((BlockConfig,), SetSelfAttention(name)),), paper)


def _papers(rows: Mapping[Any, ActivationRow] | Mapping[Any, NormRow]) -> str:
    return "; ".join(f"{kind}: {row.paper}" for kind, row in rows.items() if row.paper)


KNOBS: dict[str, Knob] = {
    "vocab": set_field("vocab", EmbeddingConfig),
    "context": set_field("context", EmbeddingConfig),
    "segments": set_field("segments", EmbeddingConfig, paper="Devlin et al. 2019"),
    "embedding_scale": set_field("scale", EmbeddingConfig, paper="Vaswani et al. 2017"),
    "embedding_norm": Knob((((ModelConfig,), _set_embedding_norm),), "Le Scao et al. 2022"),
    "image": set_field("image", PatchConfig, paper="Dosovitskiy et al. 2021"),
    "patch": set_field("patch", PatchConfig, paper="Dosovitskiy et al. 2021"),
    "channels": set_field("channels", PatchConfig, paper="Dosovitskiy et al. 2021"),
    "class_token": set_field("class_token", PatchConfig, paper="Dosovitskiy et al. 2021"),
    "width": set_field("width", BlockConfig, paper="Vaswani et al. 2017"),
    "depth": Knob((((StackConfig,), _set_depth),), "Vaswani et al. 2017"),
    "attention": set_self_attention("kind", "softmax: Vaswani et al. 2017; linear: Katharopoulos et al. 2020"),
    "heads": set_field("heads", AttentionConfig, paper="Vaswani et al. 2017"),
    "kv_heads": set_field("kv_heads", AttentionConfig, paper="1: Shazeer 2019; more: Ainslie et al. 2023"),
    "head_dim": set_field("head_dim", AttentionConfig, paper="Vaswani et al. 2017"),
    "value_dim": set_field("value_dim", AttentionConfig, paper="Vaswani et al. 2017"),
    "scale": set_field("scale", AttentionConfig, paper="Vaswani et al. 2017"),
    "softcap": set_field("softcap", AttentionConfig, paper="Gemma Team 2024"),
    "mask": set_self_attention("mask", "causal, full: Vaswani et al. 2017; prefix: Raffel et al. 2020"),
    "window": set_self_attention("window", "Beltagy et al. 2020"),
    "global_tokens": set_self_attention("global_tokens", "Beltagy et al. 2020"),
    "random_blocks": set_self_attention("random_blocks", "Zaheer et al. 2020"),
    "block_size": set_self_attention("block_size", "Zaheer et al. 2020"),
    "qk_norm": Knob((((BlockConfig,), _set_qk_norm),), "Dehghani et al. 2023"),
    "positions": Knob(
        (((EmbeddingConfig, PatchConfig), _set_input_positions), ((BlockConfig,), _set_attention_positions)),
        "sinusoid: Vaswani et al. 2017; learned: Gehring et al. 2017; rotary: Su et al. 2021; "
        "alibi: Press et al. 2022; buckets: Raffel et al. 2020",
    ),
    "rotary_base": set_field("base", Rotary, paper="Su et al. 2021"),
    "rotary_dim": set_field("dim", Rotary, paper="Wang and Komatsuzaki 2021"),
    "scaling": set_field(
        "scaling",
        Rotary,
        paper="linear: Chen et al. 2023; yarn: Peng et al. 2023; longrope: Ding et al. 2024; "
        "llama3: Grattafiori et al. 2024",
    ),
    "hidden": set_field("hidden", FeedForwardConfig, paper="Vaswani et al. 2017"),
    "activation": set_field("activation", FeedForwardConfig, paper=_papers(ACTIVATION_ROWS)),
    "gated": set_field("gated", FeedForwardConfig, paper="Shazeer 2020"),
    "experts": Knob((((FeedForwardConfig,), _set_experts),), "Shazeer et al. 2017"),
    "top_k": set_field("top_k", ExpertsConfig, paper="Shazeer et al. 2017"),
    "norm": Knob((((NormConfig,), _set_norm_kind),), _papers(NORM_ROWS)),
    "eps": set_field("eps", NormConfig),
    "norm_place": Knob(
        (((BlockConfig,), SetField("norm_place")), ((StackConfig,), _set_final_norm)),
        "post: Vaswani et al. 2017; pre: Xiong et al. 2020; output: OLMo Team 2024; sandwich: Ding et al. 2021",
    ),
    "residual": set_field(
        "residual", BlockConfig, paper="sequential: He et al. 2016; parallel: Wang and Komatsuzaki 2021"
    ),
    "bias": Knob((((AttentionConfig, FeedForwardConfig), _set_bias),)),
    "dropout": set_field(
        "dropout",
        *(AttentionConfig, FeedForwardConfig, BlockConfig, EmbeddingConfig, PatchConfig),
        paper="Srivastava et al. 2014",
    ),
    "attention_dropout": set_field("dropout", AttentionConfig),
    "embedding_dropout": set_field("dropout", EmbeddingConfig, PatchConfig, paper="Vaswani et al. 2017"),
    "word_dropout": set_field("word_dropout", EmbeddingConfig, paper="Gal and Ghahramani 2016"),
    "head_dropout": set_field("dropout", HeadConfig),
    "head": Knob((((ModelConfig,), _set_head),), "Devlin et al. 2019"),
    "classes": set_field("classes", HeadConfig),
    "pooling": set_field("pooling", HeadConfig, paper="first: Devlin et al. 2019; mean: Reimers and Gurevych 2019"),
    "pooler": set_field("pooler", HeadConfig, paper="Devlin et al. 2019"),
    "tie": set_field("tie", ModelConfig, paper="output: Press and Wolf 2017; three_way: Vaswani et al. 2017"),
    "init": set_field(
        "kind",
        InitConfig,
        paper="normal: Radford et al. 2019; xavier: Glorot and Bengio 2010; t5: Raffel et al. 2020; "
        "small: Nguyen and Salazar 2019",
    ),
    "std": set_field("std", InitConfig, paper="Radford et al. 2018"),
}


# Knobs set after all others: those of parts that another knob may add, and specific dropout rates, which override
# the general `dropout`.
APPLIED_LAST = (
    *("rotary_base", "rotary_dim", "scaling", "top_k", "classes", "pooling", "pooler"),
    *("attention_dropout", "embedding_dropout", "head_dropout"),
)


# Names that papers, the documents' listings and other libraries use -> the knob.
OTHER_NAMES = {
    **dict.fromkeys(("layers", "n_layer", "n_layers", "num_layers", "num_hidden_layers", "num_blocks"), "depth"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead"), "heads"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("d_model", "dim", "hidden_size", "n_embd", "emb_dim", "embed_dim"), "width"),
    **dict.fromkeys(("d_ff", "intermediate_size", "ffn_dim", "n_inner", "dim_feedforward"), "hidden"),
    **dict.fromkeys(("vocab_size", "n_vocab"), "vocab"),
    **dict.fromkeys(("max_len", "max_seq_len", "n_ctx", "n_positions", "max_position_embeddings"), "context"),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_experts"), "experts"),
    **dict.fromkeys(("num_classes", "num_labels"), "classes"),
    **dict.fromkeys(("d_k", "d_head"), "head_dim"),
    **dict.fromkeys(("hidden_act", "activation_function"), "activation"),
    **dict.fromkeys(("rope_theta", "rope_base"), "rotary_base"),
    **dict.fromkeys(("sliding_window",), "window"),
    **dict.fromkeys(("tie_word_embeddings", "tie_weights"), "tie"),
    **dict.fromkeys(("num_experts_per_tok",), "top_k"),
}


def suggest_knob(name: str) -> str:
    """Return the end of an error message about an unknown knob: that of the same meaning, or of a similar name."""
    return f"; did you mean {OTHER_NAMES[name]!r}?" if name in OTHER_NAMES else did_you_mean(name, KNOBS)


def vary(config: ModelConfig, **knobs: Unpack[Knobs]) -> ModelConfig:
    """Return a copy of a configuration with some values changed; the names of `knobs` are listed in KNOBS."""
    if not isinstance(config, ModelConfig):
        preset = f"mb.preset({config!r:.60})" if isinstance(config, str) else "mb.preset(name)"
        instead = "model.config" if hasattr(config, "config") else preset
        kind = with_article(type(config).__name__)
        raise ConfigError(f"vary changes a ModelConfig, but got {kind}; write mb.vary({instead}, …)")
    return _apply_knobs(config, knobs)


def _apply_knobs(config: ModelConfig, knobs: Mapping[str, Any]) -> ModelConfig:
    for name in knobs:
        if name not in KNOBS:
            raise ConfigError(f"there is no knob {name!r}{suggest_knob(name)}")
    later = {name: value for name, value in knobs.items() if name in APPLIED_LAST}
    if later and len(later) < len(knobs):
        earlier = {name: value for name, value in knobs.items() if name not in later}
        return _apply_knobs(_apply_knobs(config, earlier), later)
    applied: set[str] = set()

    def set_knobs(part: Any, values: FieldValues) -> None:
        for name, value in knobs.items():
            for classes, set_value in KNOBS[name].setters:
                if isinstance(part, classes):
                    set_value(part, values, value)
                    applied.add(name)

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, AttentionConfig):
            return  # set with the knobs of its block, since these include more of its fields
        attention = [name for name in ("attention", "cross") if isinstance(values.get(name), AttentionConfig)]
        for name in attention:
            values[name] = {f.name: getattr(values[name], f.name) for f in dataclasses.fields(AttentionConfig)}
            set_knobs(getattr(part, name), values[name])
        set_knobs(part, values)
        values |= {name: AttentionConfig(**values[name]) for name in attention}
        if isinstance(part, BlockConfig) and "width" in knobs and "hidden" not in knobs:
            _scale_hidden(part, values)

    varied = rebuild(config, edit)
    for name in knobs:
        if name not in applied:
            raise ConfigError(
                f"{name}={knobs[name]!r} changes nothing: no part of this {config.family} model has it; leave it out"
            )
    blocks = [block for stack in varied.stacks.values() for repeat in stack.pattern for block in repeat.blocks]
    if "block_size" in knobs and not any(block.attention.random_blocks > 0 for block in blocks):
        raise ConfigError(
            f"block_size={knobs['block_size']!r} changes nothing: it is the size of random blocks, and this model has "
            "none; write random_blocks=… too, or leave it out"
        )
    return varied


class KnobDescription(NamedTuple):
    name: str
    hint: Any  # the type annotation
    default: Any  # REQUIRED if the family or preset decides
    meaning: str
    paper: str


def list_knobs() -> list[KnobDescription]:
    """Describe all knobs, in the order of KNOBS."""
    options = {option.name: option for option in describe_fields(Knobs)}
    return [
        KnobDescription(
            name, options[name].hint, _default_value(name, options[name].hint), options[name].meaning, KNOBS[name].paper
        )
        for name in KNOBS
    ]


def _default_value(name: str, hint: Any) -> Any:
    """Return the value of a knob in a configuration that says nothing about it."""
    classes, setter = KNOBS[name].setters[0]
    match setter:
        case SetField(field):
            default = _field_default(classes[0], field)
            return REQUIRED if default is None and not allows_none(hint) else default
        case SetSelfAttention(field):
            return _field_default(AttentionConfig, field)
    values = read_knob(PLAIN_CONFIG, name)
    return values[0] if len(values) == 1 else REQUIRED


def _field_default(cls: type, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


def read_knob(config: ModelConfig, name: str) -> list[Any]:
    """Return the different values that a knob has in the parts of a configuration; [] if no part has it."""
    if name in READERS:
        return READERS[name](config)
    classes, setter = KNOBS[name].setters[0]
    values: list[Any] = []
    for part in _parts(config):
        if isinstance(part, classes):
            match setter:
                case SetField(field):
                    values.append(getattr(part, field))
                case SetSelfAttention(field):
                    values.append(getattr(getattr(part, "attention", None), field))
                case _:
                    choices = list_choices(next(o.hint for o in describe_fields(Knobs) if o.name == name))
                    kept = [choice for choice in choices if _keeps(config, name, choice)]
                    return kept if len(kept) < len(choices) else []  # if all leave it as it is, it has no such part
    return list(dict.fromkeys(values))


def _keeps(config: ModelConfig, name: str, value: Any) -> bool:
    """Whether setting a knob to a value leaves the configuration as it is, so that this is its present value."""
    try:
        return vary(config, **{name: value}) == config
    except ConfigError:
        return False


def _parts(part: Any) -> Iterator[Any]:
    """Yield a configuration and all configurations in it."""
    if isinstance(part, tuple):
        for item in part:
            yield from _parts(item)
    elif dataclasses.is_dataclass(part):
        yield part
        for field in dataclasses.fields(part):
            yield from _parts(getattr(part, field.name))


def _read_positions(config: ModelConfig) -> list[Any]:
    inputs = [part.positions for part in _parts(config) if isinstance(part, (EmbeddingConfig, PatchConfig))]
    blocks = [part.attention.positions for part in _parts(config) if isinstance(part, BlockConfig)]
    return list(dict.fromkeys(scheme.kind for scheme in inputs + blocks if scheme is not None)) or ["none"]


READERS: dict[str, Callable[[ModelConfig], list[Any]]] = {
    "positions": _read_positions,
    "head": lambda config: [config.head.kind if config.head else "none"],
}

# A configuration whose parts have only the fields that are required.
PLAIN_BLOCK = BlockConfig(width=1, attention=AttentionConfig(heads=1), feedforward=FeedForwardConfig(hidden=1))
PLAIN_CONFIG = ModelConfig(
    input=EmbeddingConfig(vocab=1), decoder=StackConfig(pattern=(Repeat(blocks=(PLAIN_BLOCK,)),))
)
