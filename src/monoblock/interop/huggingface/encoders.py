"""DATA: Hugging Face families of text and image encoders: their templates, fields, weights and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoblock.config.families import bert, gpt, vit
from monoblock.config.model import Buckets, ModelConfig, NormConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.config.preset_blocks import modernbert
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError
from monoblock.interop.huggingface import field_converters as r, weight_rules as w
from monoblock.interop.huggingface.family import Family, derive, head_tree, is_gated
from monoblock.interop.huggingface.field_converters import FULL, SLIDING
from monoblock.interop.huggingface.field_rules import ConfigTree, FieldRule, get_value, set_value

BLOCK, ATTN, FFN = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"
BERT_NORM = NormConfig(eps=1e-12)
BERT_TEMPLATE = bert(vocab=8, width=8, depth=1, heads=1, context=8)
VIT_TEMPLATE = vit(image=8, patch=4, width=8, depth=1, heads=1, classes=2)
CLIP_TEXT_TEMPLATE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)

Classes = dict[str, tuple[ConfigTree | None, Sequence[w.Rule]]]  # the head and its weight rules, by suffix
MASKED_LM_HEAD = head_tree("masked_lm", transform="gelu", norm=BERT_NORM, bias="learned")
POOLED_HEAD = head_tree("pooled", pooler="tanh")
TAGGER_HEAD = head_tree("tagger", classes=2, bias="learned")
TOKEN_CLASSES: Classes = {
    "ForTokenClassification": (TAGGER_HEAD, w.CLASSIFIER),
    "ForQuestionAnswering": (head_tree("spans", bias="learned"), w.QA_OUTPUTS),
}


def encoder_family(
    model_type: str,
    class_prefix: str,
    fields: Sequence[FieldRule],
    weights: Sequence[w.Rule],
    classes: Classes,
    *,
    template: ModelConfig = BERT_TEMPLATE,
    prefix: str | None = None,
    ignored_modules: Sequence[str] = (),
    **options: Any,
) -> Family:
    """Return an encoder family; `classes` maps a suffix such as "ForMaskedLM" to the head and its weight rules.

    The class with the suffix "Model" stores its weights without `prefix`, which is the model_type unless given.
    `ignored_modules` are modules whose weight and bias are not needed.
    """
    prefix = f"{model_type}." if prefix is None else prefix
    return Family(
        model_type=model_type,
        template=template,
        fields=(*fields, r.num_labels()),
        weights=weights,
        classes={f"{class_prefix}{suffix}": head for suffix, (head, _) in classes.items()},
        head_weights={f"{class_prefix}{suffix}": rules for suffix, (_, rules) in classes.items()},
        prefix=prefix,
        unprefixed_classes=(f"{class_prefix}Model",),
        ignored_weights=(
            f"{prefix}embeddings.position_ids",
            *(f"{module}.{name}" for module in ignored_modules for name in ("weight", "bias")),
        ),
        **options,
    )


def size_fields(stack: str = "encoder", names: str = "") -> tuple[FieldRule, ...]:
    """Return the rules for depth, width, heads and hidden size; `names` are those of the fields, if they are others."""
    depth, width, heads, hidden = (
        names or "num_hidden_layers hidden_size num_attention_heads intermediate_size"
    ).split()
    return (
        r.field(depth, f"{stack}.depth"),
        r.field(width, f"{stack}.*.width"),
        r.field(heads, f"{stack}.*.attention.heads"),
        r.field(hidden, f"{stack}.*.feedforward.hidden"),
    )


def shared_activation(theirs: str, default: str) -> FieldRule:
    """Return the rule for a field that sets the activation of the feed-forward layers and of the head's transform."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, f"{FFN}.activation", r.read_activation(fields[theirs]))
        if tree["head"] is not None and tree["head"]["transform"] is not None:
            set_value(tree, "head.transform", r.read_activation(fields[theirs]))

    return FieldRule(
        {theirs: default},
        read,
        lambda tree: {theirs: r.write_activation(get_value(tree, f"{FFN}.activation"), default)},
    )


# -- BERT and its descendants ------------------------------------------------------------------------------------------


def _check_segments(segments: int) -> int:
    """Return the number of segments; raise ConfigError for 0, since transformers always adds a segment embedding."""
    if segments == 0:
        raise ConfigError("type_vocab_size=0 leaves no segment embedding, which this family requires; write 1 or more")
    return segments


BERT = (
    r.field("vocab_size", "input.vocab"),
    *size_fields(),
    r.field("max_position_embeddings", "input.context", 512),
    r.field("type_vocab_size", "input.segments", 2, _check_segments, _check_segments),
    shared_activation("hidden_act", "gelu"),
    r.field("layer_norm_eps", "**.eps", 1e-12),
)
ROBERTA = derive(
    BERT,
    r.offset_positions("input.context", "input.positions.offset", 512),
    r.activation("hidden_act", f"{FFN}.activation", "gelu"),
)
EMBEDDING_SIZE = r.field("embedding_size", "input.dim", 128)


def classifier_head(pooler: str) -> ConfigTree:
    return head_tree("classifier", classes=2, bias="learned", pooler=pooler)


def bert_classes(masked_lm: Sequence[w.Rule], classifier: Sequence[w.Rule] = w.CLASSIFIER) -> Classes:
    """Return the classes of BERT or a descendant, with the weight rules of two heads."""
    return {
        "Model": (POOLED_HEAD, ()),
        "ForMaskedLM": (MASKED_LM_HEAD, masked_lm),
        "ForSequenceClassification": (classifier_head("tanh"), classifier),
        **TOKEN_CLASSES,
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
        bert_classes(w.ROBERTA_MASKED_LM, w.DENSE_CLASSIFIER),
        prefix=prefix,
        ignored_modules=(f"{prefix}pooler.dense",),
        weight_aliases={"lm_head.decoder.bias": "lm_head.bias"},
    )


BERT_FAMILIES = (
    encoder_family(
        "bert",
        "Bert",
        BERT,
        w.BERT,
        bert_classes(w.BERT_MASKED_LM),
        ignored_modules=("cls.seq_relationship", "bert.pooler.dense"),
        weight_aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
    roberta_family("roberta", "Roberta"),
    roberta_family("xlm-roberta", "XLMRoberta"),
    roberta_family("camembert", "Camembert"),
    roberta_family(
        "roberta-prelayernorm",
        "RobertaPreLayerNorm",
        (r.constant(f"{BLOCK}.norm_place", "pre"), r.constant("encoder.norm", to_dict(BERT_NORM)), *ROBERTA),
        w.ROBERTA_PRELAYERNORM,
        "roberta_prelayernorm.",
    ),
    roberta_family(
        "mpnet",
        "MPNet",
        (
            *derive(ROBERTA, drop="type_vocab_size"),
            r.fixed_field("pad_token_id", 1),  # positions start at 2, whatever the file says
            r.constant("input.segments", 0),
            r.constant(f"{ATTN}.positions", to_dict(Buckets())),
            r.fixed_field("relative_attention_num_buckets", 32),  # the class computes 32, whatever the file says
        ),
        w.MPNET,
        "mpnet.",
    ),
    encoder_family(
        "distilbert",
        "DistilBert",
        (
            r.field("vocab_size", "input.vocab"),
            *size_fields(names="n_layers dim n_heads hidden_dim"),
            r.field("max_position_embeddings", "input.context", 512),
            shared_activation("activation", "gelu"),
            r.unused_field("sinusoidal_pos_embds", False),  # only how the position table was initialized
            r.constant("input.segments", 0),
        ),
        w.DISTILBERT,
        {
            "ForMaskedLM": (MASKED_LM_HEAD, w.DISTILBERT_MASKED_LM),
            "Model": (None, ()),
            "ForSequenceClassification": (classifier_head("relu"), w.DISTILBERT_CLASSIFIER),
            **TOKEN_CLASSES,
        },
    ),
    encoder_family(
        "albert",
        "Albert",
        (
            *derive(BERT, shared_activation("hidden_act", "gelu_new"), EMBEDDING_SIZE),
            r.fixed_field("num_hidden_groups", 1),
            r.fixed_field("inner_group_num", 1),
            r.unused_field("net_structure_type", 0),
            r.unused_field("gap_size", 0),
            r.unused_field("num_memory_blocks", 0),
            r.unused_field("down_scale_factor", 1),
            r.constant("encoder.tied", True),
        ),
        w.ALBERT,
        bert_classes(w.ALBERT_MASKED_LM),
        ignored_modules=("albert.pooler", "sop_classifier.classifier"),
        weight_aliases={"predictions.decoder.bias": "predictions.bias"},
    ),
    encoder_family(
        "electra",
        "Electra",
        derive(BERT, EMBEDDING_SIZE, r.activation("hidden_act", f"{FFN}.activation", "gelu")),
        w.ELECTRA,
        {
            "Model": (None, ()),
            "ForMaskedLM": (MASKED_LM_HEAD, w.ELECTRA_MASKED_LM),
            "ForPreTraining": (
                head_tree("tagger", classes=1, transform="gelu", bias="learned"),
                w.ELECTRA_DISCRIMINATOR,
            ),
            "ForSequenceClassification": (classifier_head("gelu"), w.DENSE_CLASSIFIER),
            **TOKEN_CLASSES,
        },
    ),
)

# -- ModernBERT --------------------------------------------------------------------------------------------------------


def no_first_norm() -> FieldRule:
    """Return the rule for ModernBERT's first block: it has no attention norm, since its input is normalized already."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        for index, layer in enumerate(tree["encoder"]["layers"]):
            layer["attention_norm"] = index > 0

    return FieldRule({}, read, lambda tree: {})


def modernbert_head() -> FieldRule:
    """Return the rule for the layers of ModernBERT before the output, and for how a classifier pools the tokens."""
    defaults = {"classifier_pooling": "cls", "classifier_activation": "gelu", "classifier_bias": False}
    pooling = {"cls": "first", "mean": "mean"}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        head = tree["head"]
        if head is None:
            return
        head["transform"] = r.read_activation(fields["classifier_activation"])
        head["transform_bias"] = bool(fields["classifier_bias"])
        if head["kind"] in SEQUENCE_HEADS:
            head["pooling"] = pooling[fields["classifier_pooling"]]

    def write(tree: ConfigTree) -> dict[str, Any]:
        head = tree["head"]
        if head is None:
            return {}
        theirs = next(name for name, ours in pooling.items() if ours == head["pooling"])
        activation_name = r.write_activation(head["transform"], "gelu")
        return dict(zip(defaults, (theirs, activation_name, head["transform_bias"]), strict=True))

    return FieldRule(defaults, read, write)


MODERNBERT = (
    r.field("vocab_size", "input.vocab"),
    *size_fields(),
    r.field("max_position_embeddings", "input.context", 8192),
    r.activation("hidden_activation", f"{FFN}.activation", "gelu"),
    r.field("norm_eps", "**.eps", 1e-5),
    r.flag("norm_bias", f"{BLOCK}.norm.affine **.affine", False, "scale_shift", "scale"),
    r.flag("attention_bias", f"{ATTN}.bias", False, "qkvo", ""),
    r.field("mlp_bias", f"{FFN}.bias", False),
    r.fixed_field("decoder_bias", True),
    r.layer_types(
        "encoder",
        r.every_nth("global_attn_every_n_layers", FULL, SLIDING, first=True),
        window="local_attention",
        default=128,
        to_ours=lambda size: size // 2 + 1,
        to_theirs=lambda size: 2 * (size - 1),
        global_attn_every_n_layers=3,
    ),
    r.rotary(
        "encoder",
        layer_bases=(160_000.0, 10_000.0),
        full_theta_key="global_rope_theta",
        sliding_theta_key="local_rope_theta",
    ),
    no_first_norm(),
    modernbert_head(),
    r.unused_field("layer_norm_eps", None),
    r.unused_field("position_embedding_type", "absolute"),  # the positions are always rotary
)
MODERNBERT_HEAD = {"transform": "gelu", "transform_bias": False, "norm": NormConfig(affine="scale"), "bias": "learned"}
MODERNBERT_FAMILY = encoder_family(
    "modernbert",
    "ModernBert",
    MODERNBERT,
    w.MODERNBERT,
    {
        "Model": (None, ()),
        "ForMaskedLM": (head_tree("masked_lm", **MODERNBERT_HEAD), w.MODERNBERT_MASKED_LM),
        "ForSequenceClassification": (
            head_tree("classifier", classes=2, **MODERNBERT_HEAD),
            w.MODERNBERT_CLASSIFIER,
        ),
        "ForTokenClassification": (head_tree("tagger", classes=2, **MODERNBERT_HEAD), w.MODERNBERT_CLASSIFIER),
    },
    prefix="model.",
    template=modernbert(),
)

# -- images ------------------------------------------------------------------------------------------------------------

VIT = (
    *size_fields(),
    r.field("image_size", "input.image", 224),
    r.field("patch_size", "input.patch", 16),
    r.field("num_channels", "input.channels", 3),
    r.activation("hidden_act", f"{FFN}.activation", "gelu"),
    r.field("layer_norm_eps", "**.eps", 1e-12),
    r.flag("qkv_bias", f"{ATTN}.bias", True, "qkvo", "o"),
    r.fixed_field("pooler_act", "tanh"),
    r.unused_field("pooler_output_size", None),
)


def dinov2_feedforward() -> FieldRule:
    """Return the rule for the hidden size of DINOv2: mlp_ratio · width or, if it is gated, two thirds of that.

    The size of a gated feed-forward layer (DINOv2 giant) is rounded up to a multiple of 8.
    """
    defaults = {"mlp_ratio": 4, "use_swiglu_ffn": False}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        hidden, gated = int(get_value(tree, f"{BLOCK}.width") * fields["mlp_ratio"]), bool(fields["use_swiglu_ffn"])
        set_value(tree, f"{FFN}.hidden", (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden)
        set_value(tree, f"{FFN}.gated", gated)
        if gated:
            set_value(tree, f"{FFN}.activation", "silu")

    def write(tree: ConfigTree) -> dict[str, Any]:
        width, hidden, gated = (get_value(tree, path) for path in (f"{BLOCK}.width", f"{FFN}.hidden", f"{FFN}.gated"))
        ratios = (n for n in range(1, 65) if (int(width * n * 2 / 3) + 7) // 8 * 8 == hidden)
        ratio = next(ratios, 4) if gated else hidden / width
        return {"mlp_ratio": r.int_if_whole(ratio), "use_swiglu_ffn": gated}

    return FieldRule(defaults, read, write)


PROJECTION_DIM = FieldRule(
    {"projection_dim": 512},
    lambda fields, tree: set_value(tree, "head.project", fields["projection_dim"] if tree["head"]["project"] else None),
    lambda tree: {"projection_dim": get_value(tree, "head.project") or 512},
)
CLIP_VISION = derive(
    VIT,
    r.field("patch_size", "input.patch", 32),
    r.activation("hidden_act", f"{FFN}.activation", "quick_gelu"),
    r.constant("input.bias", False),
    r.constant("input.norm", to_dict(NormConfig())),
    r.field("layer_norm_eps", "**.eps", 1e-5),
    PROJECTION_DIM,
    drop="qkv_bias pooler_act pooler_output_size",
)
CLIP_TEXT = (
    r.field("vocab_size", "input.vocab"),
    *size_fields("decoder"),
    r.field("max_position_embeddings", "input.context", 77),
    r.activation("hidden_act", "decoder.*.feedforward.activation", "quick_gelu"),
    r.field("layer_norm_eps", "**.eps", 1e-5),
    PROJECTION_DIM,
    # transformers pools at the first token with this id, which is the last of the published vocabulary.
    FieldRule({}, lambda fields, tree: None, lambda tree: {"eos_token_id": get_value(tree, "input.vocab") - 1}),
)


def clip_classes(pooling: str) -> Classes:
    heads = (head_tree("pooled", pooling=pooling, project=project) for project in (None, 512))
    return {suffix: (head, ()) for suffix, head in zip(("Model", "ModelWithProjection"), heads, strict=True)}


IMAGE_CLASSIFIER = head_tree("classifier", classes=2, bias="learned")
IMAGE_FAMILIES = (
    encoder_family(
        "vit",
        "ViT",
        VIT,
        w.vit_rules("vit"),
        {"ForImageClassification": (IMAGE_CLASSIFIER, w.CLASSIFIER), "Model": (POOLED_HEAD, ())},
        template=VIT_TEMPLATE,
    ),
    encoder_family(
        "deit",
        "DeiT",
        (*VIT, r.constant("input.distillation_token", True)),
        w.vit_rules("deit"),
        {
            "ForImageClassificationWithTeacher": (IMAGE_CLASSIFIER | {"teacher": True}, w.DEIT_TEACHER),
            "ForImageClassification": (IMAGE_CLASSIFIER, w.CLASSIFIER),
            "Model": (POOLED_HEAD, ()),
        },
        template=VIT_TEMPLATE,
    ),
    encoder_family(
        "dinov2",
        "Dinov2",
        derive(
            VIT,
            r.field("patch_size", "input.patch", 14),
            r.field("layer_norm_eps", "**.eps", 1e-6),
            dinov2_feedforward(),
            r.field("layerscale_value", f"{BLOCK}.layer_scale", 1.0),
            r.field("use_mask_token", "input.mask_token", True),
            r.unused_field("intermediate_size", None),
            drop="pooler_act pooler_output_size",
        ),
        w.DINOV2,
        {"Model": (None, ())},
        template=VIT_TEMPLATE,
        weight_variants=((is_gated, w.DINOV2_GATED),),
    ),
    encoder_family(
        "clip_vision_model",
        "CLIPVision",
        CLIP_VISION,
        w.CLIP_VISION,
        clip_classes("first"),
        template=VIT_TEMPLATE,
        prefix="vision_model.",
    ),
    encoder_family(
        "clip_text_model",
        "CLIPText",
        CLIP_TEXT,
        w.CLIP_TEXT,
        clip_classes("last"),
        template=CLIP_TEXT_TEMPLATE,
        prefix="text_model.",
    ),
)

ENCODERS = (*BERT_FAMILIES, MODERNBERT_FAMILY, *IMAGE_FAMILIES)
