"""DATA: Hugging Face text encoder families: their templates, fields, weights and classes (see decoders.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoblock.config.families import bert
from monoblock.config.model import Buckets, NormConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.config.preset_blocks import modernbert
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError
from monoblock.interop.huggingface import weight_rules as w
from monoblock.interop.huggingface.family import Family, head_tree, override, without
from monoblock.interop.huggingface.field_converters import (
    FULL,
    SLIDING,
    activation,
    every_nth,
    flag,
    layer_types,
    num_labels,
    offset_positions,
    read_activation,
    unused_field,
    write_activation,
)
from monoblock.interop.huggingface.field_rules import (
    ConfigTree,
    Constant,
    Field,
    FieldGroup,
    FieldRule,
    FixedField,
    get_value,
    set_value,
)
from monoblock.interop.huggingface.rotary import rotary

BLOCK, ATTN, FFN = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"
BERT_NORM = NormConfig(eps=1e-12)
BERT_TEMPLATE = bert(vocab=8, width=8, depth=1, heads=1, context=8)
MASKED_LM_HEAD = head_tree(kind="masked_lm", transform="gelu", norm=BERT_NORM, bias="learned")
POOLED_HEAD = head_tree(kind="pooled", pooler="tanh")
TAGGER_HEAD = head_tree(kind="tagger", classes=2, bias="learned")
SPAN_HEAD = head_tree(kind="spans", bias="learned")


def classifier_head(pooler: str, pooling: str = "first") -> ConfigTree:
    return head_tree(kind="classifier", classes=2, bias="learned", pooler=pooler, pooling=pooling)


def shared_activation(theirs: str, default: str) -> FieldGroup:
    """Return the rule for a field that sets the activation of the feed-forward layers and of the head's transform."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, f"{FFN}.activation", read_activation(fields[theirs]))
        if tree["head"] is not None and tree["head"]["transform"] is not None:
            set_value(tree, "head.transform", read_activation(fields[theirs]))

    return FieldGroup(
        {theirs: default}, read, lambda tree: {theirs: write_activation(get_value(tree, f"{FFN}.activation"), default)}
    )


def _check_segments(segments: int) -> int:
    """Return the number of segments; raise ConfigError for 0, since transformers always adds a segment embedding."""
    if segments == 0:
        raise ConfigError("type_vocab_size=0 leaves no segment embedding, which this family requires; write 1 or more")
    return segments


# -- ModernBERT --------------------------------------------------------------------------------------------------------


def no_first_norm() -> FieldGroup:
    """Return the rule for ModernBERT's first block: it has no attention norm, since its input is normalized already."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        for index, layer in enumerate(tree["encoder"]["layers"]):
            layer["attention_norm"] = index > 0

    return FieldGroup({}, read, lambda tree: {})


def norm_bias(theirs: str, ours: str) -> FieldGroup:
    """Return the rule for the boolean field `theirs`: whether every norm has a bias."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, ours, "scale_shift" if fields[theirs] else "scale")

    return FieldGroup(
        {theirs: False}, read, lambda tree: {theirs: get_value(tree, f"{BLOCK}.norm.affine") == "scale_shift"}
    )


def modernbert_head() -> FieldGroup:
    """Return the rule for the layers of ModernBERT before the output, and for how a classifier pools the tokens."""
    defaults = {"classifier_pooling": "cls", "classifier_activation": "gelu", "classifier_bias": False}
    pooling = {"cls": "first", "mean": "mean"}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        head = tree["head"]
        if head is None:
            return
        head["transform"] = read_activation(fields["classifier_activation"])
        head["transform_bias"] = bool(fields["classifier_bias"])
        if head["kind"] in SEQUENCE_HEADS:
            head["pooling"] = pooling[fields["classifier_pooling"]]

    def write(tree: ConfigTree) -> dict[str, Any]:
        head = tree["head"]
        if head is None:
            return {}
        theirs = next(name for name, ours in pooling.items() if ours == head["pooling"])
        activation_name = write_activation(head["transform"], "gelu")
        return dict(zip(defaults, (theirs, activation_name, head["transform_bias"]), strict=True))

    return FieldGroup(defaults, read, write)


MODERNBERT = (
    Field("vocab_size", "input.vocab"),
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{BLOCK}.width"),
    Field("num_attention_heads", f"{ATTN}.heads"),
    Field("intermediate_size", f"{FFN}.hidden"),
    Field("max_position_embeddings", "input.context", 8192),
    activation("hidden_activation", f"{FFN}.activation", "gelu"),
    Field("norm_eps", "**.eps", 1e-5),
    norm_bias("norm_bias", "**.affine"),
    flag("attention_bias", f"{ATTN}.bias", False, "qkvo", ""),
    Field("mlp_bias", f"{FFN}.bias", False),
    FixedField("decoder_bias", True),
    layer_types(
        "encoder",
        lambda fields, depth: every_nth(fields["global_attn_every_n_layers"], FULL, SLIDING, first=True)(fields, depth),
        window="local_attention",
        default=128,
        to_ours=lambda size: size // 2 + 1,
        to_theirs=lambda size: 2 * (size - 1),
        global_attn_every_n_layers=3,
    ),
    rotary(
        "encoder",
        layer_bases=(160_000.0, 10_000.0),
        full_theta_key="global_rope_theta",
        sliding_theta_key="local_rope_theta",
    ),
    no_first_norm(),
    modernbert_head(),
    num_labels(),
    unused_field("layer_norm_eps", None),
    unused_field("position_embedding_type", "absolute"),  # the positions are always rotary
)
MODERNBERT_HEAD = {"transform": "gelu", "transform_bias": False, "norm": NormConfig(affine="scale"), "bias": "learned"}


# -- BERT and its descendants ------------------------------------------------------------------------------------------

BERT: tuple[FieldRule, ...] = (
    Field("vocab_size", "input.vocab"),
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{BLOCK}.width"),
    Field("num_attention_heads", f"{ATTN}.heads"),
    Field("intermediate_size", f"{FFN}.hidden"),
    Field("max_position_embeddings", "input.context", 512),
    Field("type_vocab_size", "input.segments", 2, _check_segments, _check_segments),
    shared_activation("hidden_act", "gelu"),
    Field("layer_norm_eps", "**.eps", 1e-12),
    num_labels(),
)
ROBERTA = override(
    without(BERT, "max_position_embeddings"),
    offset_positions("input.context", "input.positions.offset", 512),
    activation("hidden_act", f"{FFN}.activation", "gelu"),
)
EMBEDDING_SIZE = Field("embedding_size", "input.dim", 128)


def encoder_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule],
    weights: Sequence[w.Rule],
    classes: Mapping[str, tuple[ConfigTree | None, Sequence[w.Rule]]],
    *,
    prefix: str,
    template: Any = BERT_TEMPLATE,
    **options: Any,
) -> Family:
    """Return an encoder family; `classes` maps a suffix such as "ForMaskedLM" to the head and its weight rules.

    The class with the suffix "Model" stores its weights without `prefix`.
    """
    return Family(
        model_type=model_type,
        template=template,
        fields=fields,
        weights=weights,
        classes={f"{class_prefix}{suffix}": head for suffix, (head, _) in classes.items()},
        head_weights={f"{class_prefix}{suffix}": rules for suffix, (_, rules) in classes.items()},
        prefix=prefix,
        unprefixed_classes=(f"{class_prefix}Model",),
        **options,
    )


def bert_classes(masked_lm: Sequence[w.Rule]) -> dict[str, tuple[ConfigTree | None, Sequence[w.Rule]]]:
    """Return the classes of BERT or ALBERT; `masked_lm` are the weight rules of the masked-LM head."""
    return {
        "Model": (POOLED_HEAD, ()),
        "ForMaskedLM": (MASKED_LM_HEAD, masked_lm),
        "ForSequenceClassification": (classifier_head("tanh"), w.CLASSIFIER),
        "ForTokenClassification": (TAGGER_HEAD, w.CLASSIFIER),
        "ForQuestionAnswering": (SPAN_HEAD, w.QA_OUTPUTS),
    }


def roberta_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule] = ROBERTA,
    weights: Sequence[w.Rule] = w.ROBERTA,
    prefix: str = "roberta.",
) -> Family:
    return encoder_family(
        model_type,
        class_prefix,
        fields,
        weights,
        bert_classes(w.ROBERTA_MASKED_LM)
        | {"ForSequenceClassification": (classifier_head("tanh"), w.DENSE_CLASSIFIER)},
        prefix=prefix,
        ignored_weights=(
            f"{prefix}embeddings.position_ids",
            *(f"{prefix}pooler.dense.{n}" for n in ("weight", "bias")),
        ),
        weight_aliases={"lm_head.decoder.bias": "lm_head.bias"},
    )


ENCODERS = (
    encoder_family(
        "bert",
        "Bert",
        BERT,
        w.BERT,
        bert_classes(w.BERT_MASKED_LM),
        prefix="bert.",
        ignored_weights=(
            "bert.embeddings.position_ids",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
        ),
        weight_aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    roberta_family("roberta", "Roberta"),
    roberta_family("xlm-roberta", "XLMRoberta"),
    roberta_family("camembert", "Camembert"),
    roberta_family(
        "roberta-prelayernorm",
        "RobertaPreLayerNorm",
        (Constant(f"{BLOCK}.norm_place", "pre"), Constant("encoder.norm", to_dict(BERT_NORM)), *ROBERTA),
        w.ROBERTA_PRELAYERNORM,
        "roberta_prelayernorm.",
    ),
    encoder_family(
        "mpnet",
        "MPNet",
        (
            *without(ROBERTA, "type_vocab_size"),
            FixedField("pad_token_id", 1),  # positions start at 2, whatever the file says
            Constant("input.segments", 0),
            Constant(f"{ATTN}.positions", to_dict(Buckets())),
            FixedField("relative_attention_num_buckets", 32),  # the class computes 32, whatever the file says
        ),
        w.MPNET,
        {
            "Model": (POOLED_HEAD, ()),
            "ForMaskedLM": (MASKED_LM_HEAD, w.ROBERTA_MASKED_LM),
            "ForSequenceClassification": (classifier_head("tanh"), w.DENSE_CLASSIFIER),
            "ForTokenClassification": (TAGGER_HEAD, w.CLASSIFIER),
            "ForQuestionAnswering": (SPAN_HEAD, w.QA_OUTPUTS),
        },
        prefix="mpnet.",
        ignored_weights=("mpnet.embeddings.position_ids", "mpnet.pooler.dense.weight", "mpnet.pooler.dense.bias"),
        weight_aliases={"lm_head.decoder.bias": "lm_head.bias"},
    ),
    encoder_family(
        "distilbert",
        "DistilBert",
        (
            Field("vocab_size", "input.vocab"),
            Field("n_layers", "encoder.depth"),
            Field("dim", f"{BLOCK}.width"),
            Field("n_heads", f"{ATTN}.heads"),
            Field("hidden_dim", f"{FFN}.hidden"),
            Field("max_position_embeddings", "input.context", 512),
            shared_activation("activation", "gelu"),
            unused_field("sinusoidal_pos_embds", False),  # only how the position table was initialized
            Constant("input.segments", 0),
            num_labels(),
        ),
        w.DISTILBERT,
        {
            "ForMaskedLM": (MASKED_LM_HEAD, w.DISTILBERT_MASKED_LM),
            "Model": (None, ()),
            "ForSequenceClassification": (
                classifier_head("relu"),
                (w.Rule("head.pooler", "pre_classifier"), *w.CLASSIFIER),
            ),
            "ForTokenClassification": (TAGGER_HEAD, w.CLASSIFIER),
            "ForQuestionAnswering": (SPAN_HEAD, w.QA_OUTPUTS),
        },
        prefix="distilbert.",
        ignored_weights=("distilbert.embeddings.position_ids",),
    ),
    encoder_family(
        "albert",
        "Albert",
        (
            *override(BERT, shared_activation("hidden_act", "gelu_new"), EMBEDDING_SIZE),
            FixedField("num_hidden_groups", 1),
            FixedField("inner_group_num", 1),
            unused_field("net_structure_type", 0),
            unused_field("gap_size", 0),
            unused_field("num_memory_blocks", 0),
            unused_field("down_scale_factor", 1),
            Constant("encoder.tied", True),
        ),
        w.ALBERT,
        bert_classes(w.ALBERT_MASKED_LM),
        prefix="albert.",
        ignored_weights=(
            "albert.embeddings.position_ids",
            "albert.pooler.weight",
            "albert.pooler.bias",
            "sop_classifier.classifier.weight",
            "sop_classifier.classifier.bias",
        ),
        weight_aliases={"predictions.decoder.bias": "predictions.bias"},
    ),
    encoder_family(
        "electra",
        "Electra",
        override(BERT, EMBEDDING_SIZE, activation("hidden_act", f"{FFN}.activation", "gelu")),
        w.ELECTRA,
        {
            "Model": (None, ()),
            "ForMaskedLM": (MASKED_LM_HEAD, w.ELECTRA_MASKED_LM),
            "ForPreTraining": (
                head_tree(kind="tagger", classes=1, transform="gelu", bias="learned"),
                w.ELECTRA_DISCRIMINATOR,
            ),
            "ForSequenceClassification": (classifier_head("gelu"), w.DENSE_CLASSIFIER),
            "ForTokenClassification": (TAGGER_HEAD, w.CLASSIFIER),
            "ForQuestionAnswering": (SPAN_HEAD, w.QA_OUTPUTS),
        },
        prefix="electra.",
        ignored_weights=("electra.embeddings.position_ids",),
    ),
    encoder_family(
        "modernbert",
        "ModernBert",
        MODERNBERT,
        w.MODERNBERT,
        {
            "Model": (None, ()),
            "ForMaskedLM": (head_tree(kind="masked_lm", **MODERNBERT_HEAD), w.MODERNBERT_MASKED_LM),
            "ForSequenceClassification": (
                head_tree(kind="classifier", classes=2, **MODERNBERT_HEAD),
                w.MODERNBERT_CLASSIFIER,
            ),
            "ForTokenClassification": (
                head_tree(kind="tagger", classes=2, **MODERNBERT_HEAD),
                w.MODERNBERT_CLASSIFIER,
            ),
        },
        prefix="model.",
        template=modernbert(),
    ),
)
