"""Change some choices of a configuration and keep the rest: `vary(config, norm="rms", kv_heads=2)`.

A knob is a short name for a field somewhere inside a ModelConfig.  The fields of `Knobs` state its type, meaning and
paper, the classes that have the field, and the function that sets it if more changes than a field.  All knobs of a call
are set in one pass, inner parts first, so that values that must agree (width and heads, window and random_blocks) are
validated together, in any order. Family constructors, recipes and the command line use these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from monoblock.config.field_description import REQUIRED, allows_none, describe_fields, list_choices
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
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
    NormKind,
    PositionScheme,
    Scaling,
)
from monoblock.config.schema import shorten_int
from monoblock.errors import ConfigError, did_you_mean, with_article

EncoderHead = Literal["pooled", "masked_lm", "classifier", "regression", "tagger", "spans", "none"]


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


# -- knobs that set more than a field ---------------------------------------------------------------------------------


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


def _set_norm_place(part: BlockConfig | StackConfig, values: FieldValues, norm_place: str) -> None:
    """Remove the norm after the last block if the blocks are post-norm, since these end with one; else add it."""
    if isinstance(part, BlockConfig):
        values["norm_place"] = norm_place
    else:
        values["norm"] = None if norm_place == "post" else values["norm"] or values["pattern"][0].blocks[0].norm


def _set_positions(part: EmbeddingConfig | PatchConfig | BlockConfig, values: FieldValues, positions: str) -> None:
    """Set the positions of the input and of self-attention; for image patches, sinusoids encode row and column."""
    _check_choice("positions", positions, POSITION_SCHEMES)
    added, inside, _ = POSITION_SCHEMES[positions]  # type: ignore[index]
    if isinstance(part, BlockConfig):
        values["attention"]["positions"] = inside
    else:
        is_grid = isinstance(part, PatchConfig) and isinstance(added, Sinusoid)
        values["positions"] = Sinusoid(form="grid") if is_grid else added


def _check_choice(name: str, value: Any, choices: Mapping[Any, Any], note: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(choices)}{note or did_you_mean(str(value), choices)}"
        )


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
    _check_choice("head", head, heads)
    if classes is not None and head not in HEADS_WITH_CLASSES:
        kinds = ", ".join(HEADS_WITH_CLASSES)
        raise ConfigError(f"classes={classes} is only for the heads {kinds}, not for head={head!r}; leave it out")
    return heads[head]()


# The heads that published decoders have: they read the last token, which sees the others.
DECODER_HEADS: dict[str, HeadConfig | None] = {
    "classifier": HeadConfig(kind="classifier", classes=2, pooling="last"),
    "regression": HeadConfig(kind="regression", pooling="last", classes=1),
    "none": None,
}


def _set_head(part: ModelConfig, values: FieldValues, head: str) -> None:
    """Give an encoder or a decoder the usual head of kind `head`, unless its head has this kind already."""
    if part.family == "encoder-decoder":
        raise ConfigError(f"head={head!r} is for an encoder or a decoder, not for an encoder-decoder; leave it out")
    if head == (part.head.kind if part.head else "none"):
        return
    if part.family == "decoder-only":
        _check_choice("head", head, DECODER_HEADS, ", which a decoder can have; leave it out")
        values["head"], values["tie"] = DECODER_HEADS[head], "none"
    else:
        values["head"] = build_encoder_head(head, None, values["encoder"].pattern[0].blocks[0].norm)
        values["tie"] = "output" if head == "masked_lm" else "none"


# -- the knobs ---------------------------------------------------------------------------------------------------------

NO_PAPER = "—"
ANY_INPUT = (EmbeddingConfig, PatchConfig)
ATTENTION_AND_FEEDFORWARD = (AttentionConfig, FeedForwardConfig)


class Knob(NamedTuple):
    """What a knob sets: the field of its name, or `field`, in every part of these classes."""

    parts: type | tuple[type, ...]
    paper: str = NO_PAPER  # if papers differ by value, each begins with the value
    field: str = ""  # "attention.mask": in a block, of self-attention only
    apply: Callable[[Any, FieldValues, Any], None] | None = None  # sets what is more than a field
    is_late: bool = False  # set after others, because another knob may add the part, or sets it less specifically

    def set(self, part: Any, values: FieldValues, value: Any) -> None:
        if self.apply is not None:
            self.apply(part, values, value)
        else:
            *outer, name = self.field.split(".")
            (values[outer[0]] if outer else values)[name] = value


def _papers(rows: Mapping[Any, Any]) -> str:
    return "; ".join(f"{kind}: {row.paper}" for kind, row in rows.items() if row.paper)


class StyleKnobs(TypedDict, total=False):
    """The knobs that are not a named parameter of any family constructor."""

    # number of token types that are embedded; 0: none
    segments: Annotated[int, Knob(EmbeddingConfig, "Devlin et al. 2019")]
    # factor on the token embedding; sqrt_width with sinusoid positions
    embedding_scale: Annotated[
        float | Literal["sqrt_width"], Knob(EmbeddingConfig, "Vaswani et al. 2017", field="scale")
    ]
    # normalize the embedding
    embedding_norm: Annotated[bool, Knob(ModelConfig, "Le Scao et al. 2022", apply=_set_embedding_norm)]
    # put a learned token before the image patches
    class_token: Annotated[bool, Knob(PatchConfig, "Dosovitskiy et al. 2021")]
    # weights by a softmax of scores, or by products of features (linear time)
    attention: Annotated[
        Literal["softmax", "linear"],
        Knob(BlockConfig, "softmax: Vaswani et al. 2017; linear: Katharopoulos et al. 2020", field="attention.kind"),
    ]
    # number of key/value heads, which query heads share; None: one per query head
    kv_heads: Annotated[int | None, Knob(AttentionConfig, "1: Shazeer 2019; more: Ainslie et al. 2023")]
    # size of a value head; None: head_dim
    value_dim: Annotated[int | None, Knob(AttentionConfig, "Vaswani et al. 2017")]
    # factor on the attention scores; None: 1 / sqrt(head_dim); 1: not scaled
    scale: Annotated[float | None, Knob(AttentionConfig, "Vaswani et al. 2017")]
    # attention scores become cap * tanh(score / cap); None: no cap
    softcap: Annotated[float | None, Knob(AttentionConfig, "Gemma Team 2024")]
    # a token sees earlier tokens, also the whole prefix, or all tokens
    mask: Annotated[
        Literal["causal", "prefix", "full"],
        Knob(BlockConfig, "causal, full: Vaswani et al. 2017; prefix: Raffel et al. 2020", field="attention.mask"),
    ]
    # a token sees only keys closer than this; None: all that the mask allows
    window: Annotated[int | None, Knob(BlockConfig, "Beltagy et al. 2020", field="attention.window")]
    # tokens that flags mark, by default the first, see and are seen beyond the window
    global_tokens: Annotated[bool, Knob(BlockConfig, "Beltagy et al. 2020", field="attention.global_tokens")]
    # number of random earlier blocks that each block of positions sees beyond the window
    random_blocks: Annotated[int, Knob(BlockConfig, "Zaheer et al. 2020", field="attention.random_blocks")]
    # number of positions in a random block
    block_size: Annotated[int, Knob(BlockConfig, "Zaheer et al. 2020", field="attention.block_size")]
    # normalize queries and keys
    qk_norm: Annotated[bool, Knob(BlockConfig, "Dehghani et al. 2023", apply=_set_qk_norm)]
    # how positions are encoded
    positions: Annotated[
        PositionScheme, Knob((*ANY_INPUT, BlockConfig), _papers(POSITION_SCHEMES), apply=_set_positions)
    ]
    # base of the rotary wavelengths
    rotary_base: Annotated[float, Knob(Rotary, "Su et al. 2021", field="base", is_late=True)]
    # number of features of a head that are rotated; None: all
    rotary_dim: Annotated[int | None, Knob(Rotary, "Wang and Komatsuzaki 2021", field="dim", is_late=True)]
    # scaling of rotary frequencies for longer contexts; None: not scaled
    scaling: Annotated[
        Scaling | None,
        Knob(
            Rotary,
            "linear: Chen et al. 2023; yarn: Peng et al. 2023; longrope: Ding et al. 2024; "
            "llama3: Grattafiori et al. 2024",
            is_late=True,
        ),
    ]
    # nonlinearity of the feed-forward network
    activation: Annotated[Activation, Knob(FeedForwardConfig, _papers(ACTIVATION_ROWS))]
    # multiply the activation by a second projection (GLU, SwiGLU, GeGLU)
    gated: Annotated[bool, Knob(FeedForwardConfig, "Shazeer 2020")]
    # number of experts in each feed-forward network; without this knob there are none
    experts: Annotated[int, Knob(FeedForwardConfig, "Shazeer et al. 2017", apply=_set_experts)]
    top_k: Annotated[int, Knob(ExpertsConfig, "Shazeer et al. 2017", is_late=True)]  # number of experts for each token
    # how sublayers, embeddings and outputs are normalized
    norm: Annotated[NormKind, Knob(NormConfig, _papers(NORM_ROWS), apply=_set_norm_kind)]
    eps: Annotated[float, Knob(NormConfig)]  # added to the variance or mean square in a norm
    # where a sublayer is normalized
    norm_place: Annotated[
        Literal["pre", "post", "output", "sandwich"],
        Knob(
            (BlockConfig, StackConfig),
            "post: Vaswani et al. 2017; pre: Xiong et al. 2020; output: OLMo Team 2024; sandwich: Ding et al. 2021",
            apply=_set_norm_place,
        ),
    ]
    # how sublayers are added; none: not
    residual: Annotated[
        Literal["sequential", "parallel", "parallel_shared", "none"],
        Knob(BlockConfig, "sequential: He et al. 2016; parallel: Wang and Komatsuzaki 2021"),
    ]
    # biases in attention and feed-forward projections
    bias: Annotated[bool, Knob(ATTENTION_AND_FEEDFORWARD, apply=_set_bias)]
    # dropout probability everywhere except in the head
    dropout: Annotated[float, Knob((*ATTENTION_AND_FEEDFORWARD, BlockConfig, *ANY_INPUT), "Srivastava et al. 2014")]
    # dropout probability of the attention weights; overrides dropout
    attention_dropout: Annotated[float, Knob(AttentionConfig, field="dropout", is_late=True)]
    # dropout probability of the embedding; overrides dropout
    embedding_dropout: Annotated[float, Knob(ANY_INPUT, "Vaswani et al. 2017", field="dropout", is_late=True)]
    # probability that the whole embedding of a token is set to zero
    word_dropout: Annotated[float, Knob(EmbeddingConfig, "Gal and Ghahramani 2016")]
    head_dropout: Annotated[float, Knob(HeadConfig, field="dropout", is_late=True)]  # dropout probability in the head
    # which hidden state represents the sequence
    pooling: Annotated[
        Literal["first", "last", "mean"],
        Knob(HeadConfig, "first: Devlin et al. 2019; mean: Reimers and Gurevych 2019", is_late=True),
    ]
    # activation of a linear layer after pooling
    pooler: Annotated[Literal["none", "tanh", "relu", "gelu"], Knob(HeadConfig, "Devlin et al. 2019", is_late=True)]
    # which embeddings and output share a matrix
    tie: Annotated[
        Literal["none", "output", "source_target", "three_way"],
        Knob(ModelConfig, "output: Press and Wolf 2017; three_way: Vaswani et al. 2017"),
    ]
    # how the weights are initialized
    init: Annotated[
        Literal["normal", "xavier", "t5", "small"],
        Knob(
            InitConfig,
            "normal: Radford et al. 2019; xavier: Glorot and Bengio 2010; t5: Raffel et al. 2020; "
            "small: Nguyen and Salazar 2019",
            field="kind",
        ),
    ]
    std: Annotated[float, Knob(InitConfig, "Radford et al. 2018")]  # standard deviation of the initialization


class HeadSizeKnobs(StyleKnobs, total=False):
    """The knobs of a family whose constructor has `hidden`, but not `head_dim`."""

    # size of a query and key head; None: width / heads
    head_dim: Annotated[int | None, Knob(AttentionConfig, "Vaswani et al. 2017")]


class SizeKnobs(HeadSizeKnobs, total=False):
    """The knobs of a family whose constructor has neither `hidden` nor `head_dim`."""

    # hidden size of the feed-forward network; 0: no feed-forward network
    hidden: Annotated[int, Knob(FeedForwardConfig, "Vaswani et al. 2017")]


class Knobs(SizeKnobs, total=False):
    """All knobs."""

    vocab: Annotated[int, Knob(EmbeddingConfig)]  # size of the vocabulary
    # length of the longest sequence; a limit for learned positions
    context: Annotated[int | None, Knob(EmbeddingConfig)]
    image: Annotated[int, Knob(PatchConfig, "Dosovitskiy et al. 2021")]  # height and width of an image in pixels
    patch: Annotated[int, Knob(PatchConfig, "Dosovitskiy et al. 2021")]  # height and width of a patch in pixels
    channels: Annotated[int, Knob(PatchConfig, "Dosovitskiy et al. 2021")]  # number of colour channels of an image
    # size of the hidden states; hidden is scaled with it, unless it is given too
    width: Annotated[int, Knob(BlockConfig, "Vaswani et al. 2017")]
    # number of blocks, in the encoder and in the decoder
    depth: Annotated[int, Knob(StackConfig, "Vaswani et al. 2017", apply=_set_depth)]
    heads: Annotated[int, Knob(AttentionConfig, "Vaswani et al. 2017")]  # number of query heads
    # the head of an encoder; a decoder can have classifier, regression and none
    head: Annotated[EncoderHead, Knob(ModelConfig, "Devlin et al. 2019", apply=_set_head)]
    # number of outputs of a classifier, tagger or regression head
    classes: Annotated[int, Knob(HeadConfig, is_late=True)]


def _stated_knobs() -> dict[str, Knob]:
    """Return the knobs by name, those that are named parameters of families first."""
    knobs = {name: get_args(hint)[1] for name, hint in get_type_hints(Knobs, include_extras=True).items()}
    names = [name for name in knobs if name not in SizeKnobs.__annotations__] + list(SizeKnobs.__annotations__)
    return {name: knobs[name]._replace(field=knobs[name].field or name) for name in names}


KNOBS = _stated_knobs()


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
    later = {name: value for name, value in knobs.items() if KNOBS[name].is_late}
    if later and len(later) < len(knobs):
        earlier = {name: value for name, value in knobs.items() if name not in later}
        return _apply_knobs(_apply_knobs(config, earlier), later)
    applied: set[str] = set()

    def set_knobs(part: Any, values: FieldValues) -> None:
        for name, value in knobs.items():
            if isinstance(part, KNOBS[name].parts):
                KNOBS[name].set(part, values, value)
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
            name, options[name].hint, _default_value(knob, name, options[name].hint), options[name].meaning, knob.paper
        )
        for name, knob in KNOBS.items()
    ]


def _default_value(knob: Knob, name: str, hint: Any) -> Any:
    """Return the value of a knob in a configuration that says nothing about it."""
    if knob.apply is not None:
        values = read_knob(PLAIN_CONFIG, name)
        return values[0] if len(values) == 1 else REQUIRED
    *inner, field = knob.field.split(".")
    part = knob.parts[0] if isinstance(knob.parts, tuple) else knob.parts
    default = next(one.default for one in dataclasses.fields(AttentionConfig if inner else part) if one.name == field)
    return REQUIRED if default is None and not allows_none(hint) else default


def read_knob(config: ModelConfig, name: str) -> list[Any]:
    """Return the different values that a knob has in the parts of a configuration; [] if no part has it."""
    knob = KNOBS[name]
    if name == "head":
        return [config.head.kind if config.head else "none"]
    parts: list[Any] = [part for part in _parts(config) if isinstance(part, knob.parts)]
    if name == "positions":
        schemes = [part.attention.positions if isinstance(part, BlockConfig) else part.positions for part in parts]
        return list(dict.fromkeys(scheme.kind for scheme in schemes if scheme is not None)) or ["none"]
    if knob.apply is None:
        return list(dict.fromkeys(map(attrgetter(knob.field), parts)))
    choices = list_choices(get_type_hints(Knobs)[name])
    kept = [choice for choice in choices if parts and _keeps(config, name, choice)]
    return kept if len(kept) < len(choices) else []  # if all leave it as it is, it has no such part


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


# A configuration whose parts have only the fields that are required.
PLAIN_BLOCK = BlockConfig(width=1, attention=AttentionConfig(heads=1), feedforward=FeedForwardConfig(hidden=1))
PLAIN_CONFIG = ModelConfig(
    input=EmbeddingConfig(vocab=1), decoder=StackConfig(pattern=(Repeat(blocks=(PLAIN_BLOCK,)),))
)
