"""DATA: published encoders of text: structure, fields, classes and weights of each (see hf_decoders.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoblock.config import NormConfig
from monoblock.errors import ConfigError
from monoblock.families import bert
from monoblock.interop import hf_weights as w
from monoblock.interop.hf_config import Const, Field, Fixed, Row, Several, Tree, get, put
from monoblock.interop.hf_family import Family, head, over, without
from monoblock.interop.hf_rotary import rotary
from monoblock.interop.hf_words import (
    FULL,
    SLIDING,
    activation,
    every,
    flag,
    from_activation,
    labels,
    layer_types,
    offset_positions,
    to_activation,
    unheeded,
)
from monoblock.presets import modernbert

B, A, F = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"
NORM = NormConfig(eps=1e-12)
BERT_LIKE = bert(vocab=8, width=8, depth=1, heads=1, context=8)
MASKED = head(kind="masked_lm", transform="gelu", norm=NORM, bias="learned")
POOLED = head(kind="pooled", pooler="tanh")
TAGGER = head(kind="tagger", classes=2, bias="learned")
SPANS = head(kind="spans", bias="learned")


def classifier(pooler: str, pooling: str = "first") -> Tree:
    return head(kind="classifier", classes=2, bias="learned", pooler=pooler, pooling=pooling)


def activations(theirs: str, default: str) -> Several:
    """One activation for the feed-forward and for what a head puts before its output."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, f"{F}.activation", to_activation(given[theirs]))
        if tree["head"] is not None and tree["head"]["transform"] is not None:
            put(tree, "head.transform", to_activation(given[theirs]))

    return Several(
        {theirs: default}, read, lambda tree: {theirs: from_activation(get(tree, f"{F}.activation"), default)}
    )


def _some(segments: int) -> int:
    """The published classes look a segment up for every token, so there is one at least."""
    if segments == 0:
        raise ConfigError("type_vocab_size=0 leaves no table of segments, which this family's class looks up")
    return segments


BERT: tuple[Row, ...] = (
    Field("vocab_size", "input.vocab"),
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{B}.width"),
    Field("num_attention_heads", f"{A}.heads"),
    Field("intermediate_size", f"{F}.hidden"),
    Field("max_position_embeddings", "input.context", 512),
    Field("type_vocab_size", "input.segments", 2, _some, _some),
    activations("hidden_act", "gelu"),
    Field("layer_norm_eps", "**.eps", 1e-12),
    labels(),
)
ROBERTA = over(
    without(BERT, "max_position_embeddings"),
    offset_positions("input.context", "input.positions.offset", 512),
    activation("hidden_act", f"{F}.activation", "gelu"),
)
EMBEDDED = Field("embedding_size", "input.dim", 128)


def family(
    kind: str,
    name: str,
    rows: Sequence[Row],
    weights: Sequence[w.Rule],
    classes: Mapping[str, tuple[Tree | None, Sequence[w.Rule]]],
    *,
    prefix: str,
    start: Any = BERT_LIKE,
    **more: Any,
) -> Family:
    """An encoder; the bare class is the one called Model."""
    return Family(
        kind=kind,
        start=start,
        rows=rows,
        weights=weights,
        classes={f"{name}{what}": given for what, (given, _) in classes.items()},
        heads={f"{name}{what}": rules for what, (_, rules) in classes.items()},
        prefix=prefix,
        bare=(f"{name}Model",),
        **more,
    )


def roberta(kind: str, name: str) -> Family:
    return family(
        kind,
        name,
        ROBERTA,
        w.ROBERTA,
        {
            "Model": (POOLED, ()),
            "ForMaskedLM": (MASKED, w.ROBERTA_MASKED),
            "ForSequenceClassification": (classifier("tanh"), w.DENSE_CLASSIFIER),
            "ForTokenClassification": (TAGGER, w.CLASSIFIER),
            "ForQuestionAnswering": (SPANS, w.SPANS),
        },
        prefix="roberta.",
        ignored=("roberta.embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
        alike={"lm_head.decoder.bias": "lm_head.bias"},
    )


def first_is_normed() -> Several:
    """ModernBERT: what enters the first block is normed already."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        for number, layer in enumerate(tree["encoder"]["layers"]):
            layer["attention_norm"] = number > 0

    return Several({}, read, lambda tree: {})


def switched_bias(theirs: str, ours: str) -> Several:
    """A switch for the shift of every norm."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, ours, "scale_shift" if given[theirs] else "scale")

    return Several({theirs: False}, read, lambda tree: {theirs: get(tree, f"{B}.norm.affine") == "scale_shift"})


MODERNBERT = (
    Field("vocab_size", "input.vocab"),
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{B}.width"),
    Field("num_attention_heads", f"{A}.heads"),
    Field("intermediate_size", f"{F}.hidden"),
    Field("max_position_embeddings", "input.context", 8192),
    activation("hidden_activation", f"{F}.activation", "gelu"),
    Field("norm_eps", "**.eps", 1e-5),
    switched_bias("norm_bias", "**.affine"),
    flag("attention_bias", f"{A}.bias", False, "qkvo", ""),
    Field("mlp_bias", f"{F}.bias", False),
    Fixed("decoder_bias", True),
    layer_types(
        "encoder",
        lambda given, depth: every(given["global_attn_every_n_layers"], FULL, SLIDING, first=True)(given, depth),
        window="local_attention",
        default=128,
        to_ours=lambda near: near // 2 + 1,
        to_theirs=lambda near: 2 * (near - 1),
        global_attn_every_n_layers=3,
    ),
    rotary("encoder", typed=(160_000.0, 10_000.0), far="global_rope_theta", near="local_rope_theta"),
    first_is_normed(),
    unheeded("layer_norm_eps", None),
)
MODERN_NORM = NormConfig(affine="scale")

ENCODERS = (
    family(
        "bert",
        "Bert",
        BERT,
        w.BERT,
        {
            "Model": (POOLED, ()),
            "ForMaskedLM": (MASKED, w.BERT_MASKED),
            "ForSequenceClassification": (classifier("tanh"), w.CLASSIFIER),
            "ForTokenClassification": (TAGGER, w.CLASSIFIER),
            "ForQuestionAnswering": (SPANS, w.SPANS),
        },
        prefix="bert.",
        ignored=(
            "bert.embeddings.position_ids",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
        ),
        alike={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    roberta("roberta", "Roberta"),
    roberta("xlm-roberta", "XLMRoberta"),
    roberta("camembert", "Camembert"),
    family(
        "distilbert",
        "DistilBert",
        (
            Field("vocab_size", "input.vocab"),
            Field("n_layers", "encoder.depth"),
            Field("dim", f"{B}.width"),
            Field("n_heads", f"{A}.heads"),
            Field("hidden_dim", f"{F}.hidden"),
            Field("max_position_embeddings", "input.context", 512),
            activations("activation", "gelu"),
            unheeded("sinusoidal_pos_embds", False),  # how the stored table began
            Const("input.segments", 0),
            labels(),
        ),
        w.DISTILBERT,
        {
            "ForMaskedLM": (MASKED, w.DISTILBERT_MASKED),
            "Model": (None, ()),
            "ForSequenceClassification": (
                classifier("relu"),
                (w.Rule("head.pooler", "pre_classifier"), *w.CLASSIFIER),
            ),
            "ForTokenClassification": (TAGGER, w.CLASSIFIER),
            "ForQuestionAnswering": (SPANS, w.SPANS),
        },
        prefix="distilbert.",
        ignored=("distilbert.embeddings.position_ids",),
    ),
    family(
        "albert",
        "Albert",
        (
            *over(BERT, activations("hidden_act", "gelu_new"), EMBEDDED),
            Fixed("num_hidden_groups", 1),
            Fixed("inner_group_num", 1),
            unheeded("net_structure_type", 0),
            unheeded("gap_size", 0),
            unheeded("num_memory_blocks", 0),
            unheeded("down_scale_factor", 1),
            Const("encoder.tied", True),
        ),
        w.ALBERT,
        {
            "Model": (POOLED, ()),
            "ForMaskedLM": (MASKED, w.ALBERT_MASKED),
            "ForSequenceClassification": (classifier("tanh"), w.CLASSIFIER),
            "ForTokenClassification": (TAGGER, w.CLASSIFIER),
            "ForQuestionAnswering": (SPANS, w.SPANS),
        },
        prefix="albert.",
        ignored=(
            "albert.embeddings.position_ids",
            "albert.pooler.weight",
            "albert.pooler.bias",
            "sop_classifier.classifier.weight",
            "sop_classifier.classifier.bias",
        ),
        alike={"predictions.decoder.bias": "predictions.bias"},
    ),
    family(
        "electra",
        "Electra",
        over(BERT, EMBEDDED, activation("hidden_act", f"{F}.activation", "gelu")),
        w.ELECTRA,
        {
            "Model": (None, ()),
            "ForMaskedLM": (MASKED, w.ELECTRA_MASKED),
            "ForPreTraining": (
                head(kind="tagger", classes=1, transform="gelu", bias="learned"),
                w.ELECTRA_FOUND,
            ),
            "ForSequenceClassification": (classifier("gelu"), w.DENSE_CLASSIFIER),
            "ForTokenClassification": (TAGGER, w.CLASSIFIER),
            "ForQuestionAnswering": (SPANS, w.SPANS),
        },
        prefix="electra.",
        ignored=("electra.embeddings.position_ids",),
    ),
    family(
        "modernbert",
        "ModernBert",
        MODERNBERT,
        w.MODERNBERT,
        {
            "Model": (None, ()),
            "ForMaskedLM": (
                head(kind="masked_lm", transform="gelu", transform_bias=False, norm=MODERN_NORM, bias="learned"),
                w.MODERNBERT_MASKED,
            ),
        },
        prefix="model.",
        start=modernbert(),
    ),
)
