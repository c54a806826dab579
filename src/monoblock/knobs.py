"""Swap one choice and keep the rest: `vary(config, norm="rms", kv_heads=2)`.

A knob is a flat name for a choice that lies somewhere in the tree of a ModelConfig.  KNOBS says which class holds it
and how it is written there.  All knobs of a call are applied in one pass from the leaves up, so that values that must
agree (width and heads) are validated together.  Constructors, recipes and the command line all speak these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from monoblock.config import (
    DEEPEST,
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
    Repeat,
    Rotary,
    Sinusoid,
    StackConfig,
)
from monoblock.errors import ConfigError, did_you_mean

Values = dict[str, Any]  # the fields a part is about to be built from
C = TypeVar("C")

POSITIONS: dict[str, tuple[Learned | Sinusoid | None, Rotary | Alibi | Buckets | None]] = {
    "none": (None, None),
    "sinusoid": (Sinusoid(), None),
    "learned": (Learned(), None),
    "rotary": (None, Rotary()),
    "alibi": (None, Alibi()),
    "buckets": (None, Buckets()),
}


def rebuild(part: C, edit: Callable[[Any, Values], None]) -> C:
    """A copy of a configuration in which `edit(part, values)` has changed the values of every part, leaves first."""

    def walk(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(walk(item) for item in value)
        return rebuild(value, edit) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value

    values = {f.name: walk(getattr(part, f.name)) for f in dataclasses.fields(part)}  # type: ignore[arg-type]
    edit(part, values)
    return type(part)(**values)


def whole_number(name: str, value: Any) -> int:
    """The value, if it is a whole number from 1 on: what sizes must be before anything is computed from them."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} cannot be: it is a whole number; write 1 or more")
    return value


def _field(name: str) -> Callable[[Any, Values, Any], None]:
    def write(part: Any, values: Values, value: Any) -> None:
        values[name] = value

    return write


def _own_attention(name: str) -> Callable[[Any, Values, Any], None]:
    """A field of self-attention that cross-attention does not share."""

    def write(part: BlockConfig, values: Values, value: Any) -> None:
        values["attention"] = dataclasses.replace(values["attention"], **{name: value})

    return write


def _in_proportion(block: BlockConfig, values: Values) -> None:
    """A new width keeps the proportion of hidden to it."""
    width = whole_number("width", values["width"])
    hidden = max(1, round(Fraction(block.feedforward.hidden * width, block.width)))
    values["feedforward"] = dataclasses.replace(values["feedforward"], hidden=hidden)


def deepen(pattern: tuple[Repeat, ...], depth: int) -> tuple[Repeat, ...]:
    """The pattern cut to `depth` blocks, or its last run repeated until there are as many."""
    whole_number("depth", depth)
    if depth > DEEPEST:
        raise ConfigError(f"depth={depth} is deeper than any stack; write {DEEPEST} or less")
    runs: list[Repeat] = []
    for number, run in enumerate(pattern, start=1):
        full, rest = divmod(depth, len(run.blocks))
        last = number == len(pattern) or full < run.times or (full == run.times and not rest)
        times = full if last else run.times
        if times:
            runs.append(dataclasses.replace(run, times=times))
        if last and rest and run.tied:
            raise ConfigError(f"{rest} blocks are left over from a tied run of {len(run.blocks)}; choose another depth")
        if last and rest:
            runs.append(Repeat(blocks=run.blocks[:rest]))
        if last:
            break
        depth -= times * len(run.blocks)
    return tuple(runs)


def _depth(stack: StackConfig, values: Values, depth: int) -> None:
    values["pattern"] = deepen(values["pattern"], depth)


def _norm(part: NormConfig, values: Values, kind: str) -> None:
    if kind != part.kind:
        values["kind"], values["affine"] = kind, "scale" if kind == "rms" else "scale_shift"


def _final_norm(stack: StackConfig, values: Values, place: str) -> None:
    """Post-norm ends every block normed; every other placement needs a norm after the last block."""
    values["norm"] = None if place == "post" else values["norm"] or values["pattern"][0].blocks[0].norm


def _look_up(positions: str) -> tuple[Learned | Sinusoid | None, Rotary | Alibi | Buckets | None]:
    if not isinstance(positions, str) or positions not in POSITIONS:
        raise ConfigError(
            f"positions={positions!r} is none of {', '.join(POSITIONS)}{did_you_mean(str(positions), POSITIONS)}"
        )
    return POSITIONS[positions]


def _added_positions(part: EmbeddingConfig | PatchConfig, values: Values, positions: str) -> None:
    """Sinusoids of patches tell row and column apart."""
    added = _look_up(positions)[0]
    grid = isinstance(part, PatchConfig) and isinstance(added, Sinusoid)
    values["positions"] = Sinusoid(form="grid") if grid else added


def _attention_positions(part: BlockConfig, values: Values, positions: str) -> None:
    values["attention"] = dataclasses.replace(values["attention"], positions=_look_up(positions)[1])


def _true_or_false(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} cannot be: it is there or not; write true or false")


def _bias(part: AttentionConfig | FeedForwardConfig, values: Values, bias: bool) -> None:
    _true_or_false("bias", bias)
    values["bias"] = ("qkvo" if bias else "") if isinstance(part, AttentionConfig) else bias


def _experts(part: FeedForwardConfig, values: Values, count: int) -> None:
    whole_number("experts", count)
    top_k = part.experts.top_k if part.experts else min(2, count)
    values["experts"] = dataclasses.replace(part.experts or ExpertsConfig(count=count, top_k=top_k), count=count)


def _qk_norm(part: BlockConfig, values: Values, wanted: bool) -> None:
    _true_or_false("qk_norm", wanted)
    norm = values["norm"] if wanted else None
    values["attention"] = dataclasses.replace(values["attention"], qk_norm=norm)


def _embedding_norm(part: ModelConfig, values: Values, wanted: bool) -> None:
    """A norm as that of the blocks, where there is none yet."""
    _true_or_false("embedding_norm", wanted)
    norm = (values["encoder"] or values["decoder"]).pattern[0].blocks[0].norm
    for side in ("input", "target"):
        if isinstance(values[side], EmbeddingConfig):
            values[side] = dataclasses.replace(values[side], norm=(values[side].norm or norm) if wanted else None)


def bert_head(head: str, classes: int | None, norm: NormConfig) -> HeadConfig | None:
    """A head by name; classifier and tagger know two classes where nothing is said."""
    asked = 2 if classes is None else classes
    heads: dict[str, Callable[[], HeadConfig | None]] = {
        "pooled": lambda: HeadConfig(kind="pooled", pooler="tanh"),
        "masked_lm": lambda: HeadConfig(kind="masked_lm", transform="gelu", norm=norm, bias="learned"),
        "classifier": lambda: HeadConfig(kind="classifier", classes=asked, pooler="tanh", bias="learned"),
        "tagger": lambda: HeadConfig(kind="tagger", classes=asked, bias="learned"),
        "spans": lambda: HeadConfig(kind="spans", bias="learned"),
        "none": lambda: None,
    }
    if not isinstance(head, str) or head not in heads:
        raise ConfigError(f"head={head!r} is none of {', '.join(heads)}{did_you_mean(str(head), heads)}")
    if classes is not None and head not in ("classifier", "tagger"):
        raise ConfigError(f"classes={classes} goes with a classifier or tagger, not with head={head!r}; leave it out")
    return heads[head]()


def _head(part: ModelConfig, values: Values, head: str) -> None:
    """An encoder's head by name, of the usual make; one that is of that kind already stays as it is."""
    if part.family not in ("encoder-only", "vision"):
        raise ConfigError(f"head={head!r} is for an encoder; a {part.family} model writes language")
    if head != (part.head.kind if part.head else "none"):
        values["head"] = bert_head(head, None, values["encoder"].pattern[0].blocks[0].norm)
        values["tie"] = "output" if head == "masked_lm" else "none"


Knob = tuple[tuple[type, ...], Callable[[Any, Values, Any], None]]

# name -> where the choice is written; a knob may be written in several places
KNOBS: dict[str, tuple[Knob, ...]] = {
    "vocab": (((EmbeddingConfig,), _field("vocab")),),
    "context": (((EmbeddingConfig,), _field("context")),),
    "segments": (((EmbeddingConfig,), _field("segments")),),
    "embedding_scale": (((EmbeddingConfig,), _field("scale")),),
    "embedding_norm": (((ModelConfig,), _embedding_norm),),
    "image": (((PatchConfig,), _field("image")),),
    "patch": (((PatchConfig,), _field("patch")),),
    "channels": (((PatchConfig,), _field("channels")),),
    "class_token": (((PatchConfig,), _field("class_token")),),
    "width": (((BlockConfig,), _field("width")),),
    "depth": (((StackConfig,), _depth),),
    "heads": (((AttentionConfig,), _field("heads")),),
    "kv_heads": (((AttentionConfig,), _field("kv_heads")),),
    "head_dim": (((AttentionConfig,), _field("head_dim")),),
    "value_dim": (((AttentionConfig,), _field("value_dim")),),
    "scale": (((AttentionConfig,), _field("scale")),),
    "softcap": (((AttentionConfig,), _field("softcap")),),
    "mask": (((BlockConfig,), _own_attention("mask")),),
    "window": (((BlockConfig,), _own_attention("window")),),
    "qk_norm": (((BlockConfig,), _qk_norm),),
    "positions": (((EmbeddingConfig, PatchConfig), _added_positions), ((BlockConfig,), _attention_positions)),
    "rotary_base": (((Rotary,), _field("base")),),
    "rotary_dim": (((Rotary,), _field("dim")),),
    "scaling": (((Rotary,), _field("scaling")),),
    "hidden": (((FeedForwardConfig,), _field("hidden")),),
    "activation": (((FeedForwardConfig,), _field("activation")),),
    "gated": (((FeedForwardConfig,), _field("gated")),),
    "experts": (((FeedForwardConfig,), _experts),),
    "top_k": (((ExpertsConfig,), _field("top_k")),),
    "norm": (((NormConfig,), _norm),),
    "eps": (((NormConfig,), _field("eps")),),
    "norm_place": (((BlockConfig,), _field("norm_place")), ((StackConfig,), _final_norm)),
    "residual": (((BlockConfig,), _field("residual")),),
    "bias": (((AttentionConfig, FeedForwardConfig), _bias),),
    "dropout": (((AttentionConfig, FeedForwardConfig, BlockConfig, EmbeddingConfig, PatchConfig), _field("dropout")),),
    "attention_dropout": (((AttentionConfig,), _field("dropout")),),
    "embedding_dropout": (((EmbeddingConfig, PatchConfig), _field("dropout")),),
    "word_dropout": (((EmbeddingConfig,), _field("word_dropout")),),
    "head_dropout": (((HeadConfig,), _field("dropout")),),
    "head": (((ModelConfig,), _head),),
    "classes": (((HeadConfig,), _field("classes")),),
    "pooling": (((HeadConfig,), _field("pooling")),),
    "pooler": (((HeadConfig,), _field("pooler")),),
    "tie": (((ModelConfig,), _field("tie")),),
    "init": (((InitConfig,), _field("kind")),),
    "std": (((InitConfig,), _field("std")),),
}


# They mean parts that other knobs may bring in, or the particular where `dropout` means the general.
DEPENDENT = (
    *("rotary_base", "rotary_dim", "scaling", "top_k", "classes", "pooling", "pooler"),
    *("attention_dropout", "embedding_dropout", "head_dropout"),
)


def vary(config: ModelConfig, **knobs: Any) -> ModelConfig:
    """The same model with some choices changed, by the names of KNOBS."""
    for name in knobs:
        if name not in KNOBS:
            raise ConfigError(f"there is no knob {name!r}{did_you_mean(name, KNOBS)}")
    later = {name: value for name, value in knobs.items() if name in DEPENDENT}
    if later and len(later) < len(knobs):
        return vary(vary(config, **{name: value for name, value in knobs.items() if name not in later}), **later)
    touched: set[str] = set()

    def edit(part: Any, values: Values) -> None:
        for name, value in knobs.items():
            for classes, write in KNOBS[name]:
                if isinstance(part, classes):
                    write(part, values, value)
                    touched.add(name)
        if isinstance(part, BlockConfig) and "width" in knobs and "hidden" not in knobs:
            _in_proportion(part, values)

    varied = rebuild(config, edit)
    for name in knobs:
        if name not in touched:
            raise ConfigError(f"{name}={knobs[name]!r} changes nothing: this {config.family} model has no such part")
    return varied
