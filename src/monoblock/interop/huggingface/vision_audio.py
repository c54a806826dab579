"""DATA: Hugging Face vision and audio families: their templates, fields, weights and classes (see decoders.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monoblock.config.families import bart, gpt, vit
from monoblock.config.model import FramesConfig, ModelConfig
from monoblock.interop.huggingface import weight_rules as w
from monoblock.interop.huggingface.encoder_decoders import PRE_NORM, all_attentions, bart_fields, is_gated
from monoblock.interop.huggingface.family import LM_HEAD, Family, head_tree, override, without
from monoblock.interop.huggingface.field_converters import activation, flag, num_labels, unused_field
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

BLOCK, ATTN, FFN = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"
VIT_TEMPLATE = vit(image=8, patch=4, width=8, depth=1, heads=1, classes=2)
CLIP_TEXT_TEMPLATE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)
CLASSIFIER_HEAD = head_tree(kind="classifier", classes=2, bias="learned")
POOLED_HEAD = head_tree(kind="pooled", pooler="tanh")

VIT: tuple[FieldRule, ...] = (
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{BLOCK}.width"),
    Field("num_attention_heads", f"{ATTN}.heads"),
    Field("intermediate_size", f"{FFN}.hidden"),
    Field("image_size", "input.image", 224),
    Field("patch_size", "input.patch", 16),
    Field("num_channels", "input.channels", 3),
    activation("hidden_act", f"{FFN}.activation", "gelu"),
    Field("layer_norm_eps", "**.eps", 1e-12),
    flag("qkv_bias", f"{ATTN}.bias", True, "qkvo", "o"),
    FixedField("pooler_act", "tanh"),
    unused_field("pooler_output_size", None),
    num_labels(),
)


def dinov2_feedforward() -> FieldGroup:
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
        return {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_swiglu_ffn": gated}

    return FieldGroup(defaults, read, write)


def pooled_head(pooling: str, project: bool) -> ConfigTree:
    return head_tree(kind="pooled", pooling=pooling, project=512 if project else None)


PROJECTION_DIM = FieldGroup(
    {"projection_dim": 512},
    lambda fields, tree: set_value(tree, "head.project", fields["projection_dim"] if tree["head"]["project"] else None),
    lambda tree: {"projection_dim": get_value(tree, "head.project") or 512},
)
CLIP_VISION = (
    *override(without(VIT, "qkv_bias", "pooler_act", "pooler_output_size", "id2label")),
    Field("patch_size", "input.patch", 32),
    activation("hidden_act", f"{FFN}.activation", "quick_gelu"),
    Field("layer_norm_eps", "**.eps", 1e-5),
    Constant("input.bias", False),
    Constant("input.norm", VIT_TEMPLATE.to_dict()["encoder"]["norm"]),
    Field("layer_norm_eps", "**.eps", 1e-5),
    PROJECTION_DIM,
)
CLIP_TEXT = (
    Field("vocab_size", "input.vocab"),
    Field("num_hidden_layers", "decoder.depth"),
    Field("hidden_size", "decoder.*.width"),
    Field("num_attention_heads", "decoder.*.attention.heads"),
    Field("intermediate_size", "decoder.*.feedforward.hidden"),
    Field("max_position_embeddings", "input.context", 77),
    activation("hidden_act", "decoder.*.feedforward.activation", "quick_gelu"),
    Field("layer_norm_eps", "**.eps", 1e-5),
    PROJECTION_DIM,
    # transformers pools at the first token with this id, which is the last of the published vocabulary.
    FieldGroup({}, lambda fields, tree: None, lambda tree: {"eos_token_id": get_value(tree, "input.vocab") - 1}),
)


def whisper_template() -> ModelConfig:
    config = bart(vocab=8, width=8, depth=1, heads=1, context=8)
    assert config.target is not None
    target = replace(config.target, positions=replace(config.target.positions, offset=0), norm=None)  # type: ignore[type-var]
    return replace(config, input=FramesConfig(channels=8, context=8), target=target, tie="output")


WHISPER = (
    *override(
        without(bart_fields("gelu"), "max_position_embeddings"),
        Field("vocab_size", "target.vocab"),
        flag("scale_embedding", "target.scale", False, "sqrt_width", 1.0),
    ),
    Field("num_mel_bins", "input.channels", 80),
    Field("max_source_positions", "input.context", 1500),
    Field("max_target_positions", "target.context", 448),
    unused_field("max_position_embeddings", None),
    *PRE_NORM,
    Constant(all_attentions("bias"), "qvo"),
)

VISION_AUDIO = (
    Family(
        model_type="vit",
        template=VIT_TEMPLATE,
        fields=VIT,
        weights=w.vit_rules("vit"),
        classes={"ViTForImageClassification": CLASSIFIER_HEAD, "ViTModel": POOLED_HEAD},
        head_weights={"ViTForImageClassification": w.CLASSIFIER},
        prefix="vit.",
        unprefixed_classes=("ViTModel",),
    ),
    Family(
        model_type="deit",
        template=VIT_TEMPLATE,
        fields=(*VIT, Constant("input.distillation_token", True)),
        weights=w.vit_rules("deit"),
        classes={
            "DeiTForImageClassificationWithTeacher": CLASSIFIER_HEAD | {"teacher": True},
            "DeiTForImageClassification": CLASSIFIER_HEAD,
            "DeiTModel": POOLED_HEAD,
        },
        head_weights={
            "DeiTForImageClassificationWithTeacher": w.DEIT_TEACHER,
            "DeiTForImageClassification": w.CLASSIFIER,
        },
        prefix="deit.",
        unprefixed_classes=("DeiTModel",),
    ),
    Family(
        model_type="dinov2",
        template=VIT_TEMPLATE,
        fields=(
            *without(
                VIT,
                "intermediate_size",
                "pooler_act",
                "pooler_output_size",
                "layer_norm_eps",
                "image_size",
                "patch_size",
            ),
            Field("image_size", "input.image", 224),
            Field("patch_size", "input.patch", 14),
            Field("layer_norm_eps", "**.eps", 1e-6),
            dinov2_feedforward(),
            Field("layerscale_value", f"{BLOCK}.layer_scale", 1.0),
            Field("use_mask_token", "input.mask_token", True),
            unused_field("intermediate_size", None),
        ),
        weights=w.DINOV2,
        weight_variants=((is_gated, w.DINOV2_GATED),),
        classes={"Dinov2Model": None},
        prefix="dinov2.",
        unprefixed_classes=("Dinov2Model",),
    ),
    Family(
        model_type="clip_vision_model",
        template=VIT_TEMPLATE,
        fields=CLIP_VISION,
        weights=w.CLIP_VISION,
        classes={
            "CLIPVisionModel": pooled_head("first", project=False),
            "CLIPVisionModelWithProjection": pooled_head("first", project=True),
        },
        prefix="vision_model.",
        unprefixed_classes=("CLIPVisionModel",),
        ignored_weights=("vision_model.embeddings.position_ids",),
    ),
    Family(
        model_type="clip_text_model",
        template=CLIP_TEXT_TEMPLATE,
        fields=CLIP_TEXT,
        weights=w.CLIP_TEXT,
        classes={
            "CLIPTextModel": pooled_head("last", project=False),
            "CLIPTextModelWithProjection": pooled_head("last", project=True),
        },
        prefix="text_model.",
        unprefixed_classes=("CLIPTextModel",),
        ignored_weights=("text_model.embeddings.position_ids",),
    ),
    Family(
        model_type="whisper",
        template=whisper_template(),
        fields=WHISPER,
        weights=w.WHISPER,
        classes={"WhisperForConditionalGeneration": LM_HEAD, "WhisperModel": None},
        prefix="model.",
        unprefixed_classes=("WhisperModel",),
    ),
)
