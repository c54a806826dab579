"""Change some choices of a configuration and keep the rest: `vary(config, norm="rms", kv_heads=2)`.

A knob is a short name for a field somewhere inside a ModelConfig; KNOBS maps it to the classes that have this field and
the function that sets it. All knobs of a call are set in one pass, inner parts first, so that values that must agree
(width and heads, window and random_blocks) are validated together, in any order. Family constructors, recipes and the
command line use these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeVar, Unpack

from monoblock.config.knob_options import Knobs
from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    Rotary,
    Sinusoid,
    StackConfig,
)
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.config.resize import check_positive_int, resize_pattern
from monoblock.errors import ConfigError, did_you_mean, with_article

# The arguments from which a part of a configuration is rebuilt. In those of a block, "attention" and "cross" are such
# arguments themselves until all knobs are set, so that a knob may set a field of self-attention alone.
FieldValues = dict[str, Any]
ConfigT = TypeVar("ConfigT")

POSITION_SCHEMES: dict[str, tuple[Learned | Sinusoid | None, Rotary | Alibi | Buckets | None]] = {
    "none": (None, None),
    "sinusoid": (Sinusoid(), None),
    "learned": (Learned(), None),
    "rotary": (None, Rotary()),
    "alibi": (None, Alibi()),
    "buckets": (None, Buckets()),
}


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
        values["kind"], values["affine"] = kind, {"rms": "scale", "none": "none"}.get(kind, "scale_shift")


def _set_final_norm(stack: StackConfig, values: FieldValues, norm_place: str) -> None:
    """Remove the norm after the last block if the blocks are post-norm, since these end with one; else add it."""
    values["norm"] = None if norm_place == "post" else values["norm"] or values["pattern"][0].blocks[0].norm


def _look_up_positions(positions: str) -> tuple[Learned | Sinusoid | None, Rotary | Alibi | Buckets | None]:
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

# The name of each knob, with the classes that have the field and the function that sets it there.
KNOBS: dict[str, tuple[KnobSetter, ...]] = {
    "vocab": (((EmbeddingConfig,), SetField("vocab")),),
    "context": (((EmbeddingConfig,), SetField("context")),),
    "segments": (((EmbeddingConfig,), SetField("segments")),),
    "embedding_scale": (((EmbeddingConfig,), SetField("scale")),),
    "embedding_norm": (((ModelConfig,), _set_embedding_norm),),
    "image": (((PatchConfig,), SetField("image")),),
    "patch": (((PatchConfig,), SetField("patch")),),
    "channels": (((PatchConfig,), SetField("channels")),),
    "class_token": (((PatchConfig,), SetField("class_token")),),
    "width": (((BlockConfig,), SetField("width")),),
    "depth": (((StackConfig,), _set_depth),),
    "attention": (((BlockConfig,), SetSelfAttention("kind")),),
    "heads": (((AttentionConfig,), SetField("heads")),),
    "kv_heads": (((AttentionConfig,), SetField("kv_heads")),),
    "head_dim": (((AttentionConfig,), SetField("head_dim")),),
    "value_dim": (((AttentionConfig,), SetField("value_dim")),),
    "scale": (((AttentionConfig,), SetField("scale")),),
    "softcap": (((AttentionConfig,), SetField("softcap")),),
    "mask": (((BlockConfig,), SetSelfAttention("mask")),),
    "window": (((BlockConfig,), SetSelfAttention("window")),),
    "global_tokens": (((BlockConfig,), SetSelfAttention("global_tokens")),),
    "random_blocks": (((BlockConfig,), SetSelfAttention("random_blocks")),),
    "block_size": (((BlockConfig,), SetSelfAttention("block_size")),),
    "qk_norm": (((BlockConfig,), _set_qk_norm),),
    "positions": (((EmbeddingConfig, PatchConfig), _set_input_positions), ((BlockConfig,), _set_attention_positions)),
    "rotary_base": (((Rotary,), SetField("base")),),
    "rotary_dim": (((Rotary,), SetField("dim")),),
    "scaling": (((Rotary,), SetField("scaling")),),
    "hidden": (((FeedForwardConfig,), SetField("hidden")),),
    "activation": (((FeedForwardConfig,), SetField("activation")),),
    "gated": (((FeedForwardConfig,), SetField("gated")),),
    "experts": (((FeedForwardConfig,), _set_experts),),
    "top_k": (((ExpertsConfig,), SetField("top_k")),),
    "norm": (((NormConfig,), _set_norm_kind),),
    "eps": (((NormConfig,), SetField("eps")),),
    "norm_place": (((BlockConfig,), SetField("norm_place")), ((StackConfig,), _set_final_norm)),
    "residual": (((BlockConfig,), SetField("residual")),),
    "bias": (((AttentionConfig, FeedForwardConfig), _set_bias),),
    "dropout": (
        ((AttentionConfig, FeedForwardConfig, BlockConfig, EmbeddingConfig, PatchConfig), SetField("dropout")),
    ),
    "attention_dropout": (((AttentionConfig,), SetField("dropout")),),
    "embedding_dropout": (((EmbeddingConfig, PatchConfig), SetField("dropout")),),
    "word_dropout": (((EmbeddingConfig,), SetField("word_dropout")),),
    "head_dropout": (((HeadConfig,), SetField("dropout")),),
    "head": (((ModelConfig,), _set_head),),
    "classes": (((HeadConfig,), SetField("classes")),),
    "pooling": (((HeadConfig,), SetField("pooling")),),
    "pooler": (((HeadConfig,), SetField("pooler")),),
    "tie": (((ModelConfig,), SetField("tie")),),
    "init": (((InitConfig,), SetField("kind")),),
    "std": (((InitConfig,), SetField("std")),),
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
            for classes, set_value in KNOBS[name]:
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
    if "block_size" in knobs and not any(_has_random_blocks(stack) for stack in varied.stacks.values()):
        raise ConfigError(
            f"block_size={knobs['block_size']!r} changes nothing: it is the size of random blocks, and this model has "
            "none; write random_blocks=… too, or leave it out"
        )
    return varied


def _has_random_blocks(stack: StackConfig) -> bool:
    return any(block.attention.random_blocks > 0 for repeat in stack.pattern for block in repeat.blocks)
