"""DATA: published models of images and sound: structure, fields, classes and weights of each (see hf_decoders.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monoblock.config import FramesConfig, ModelConfig
from monoblock.families import bart, gpt, vit
from monoblock.interop import hf_weights as w
from monoblock.interop.hf_config import Const, Field, Fixed, Row, Several, Tree, get, put
from monoblock.interop.hf_family import LM, Family, head, over, without
from monoblock.interop.hf_seq2seq import PRE, bart_rows, heads
from monoblock.interop.hf_words import activation, flag, labels, unheeded

B, A, F = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"
VIT_LIKE = vit(image=8, patch=4, width=8, depth=1, heads=1, classes=2)
TEXT_LIKE = gpt(vocab=8, width=8, depth=1, heads=1, context=8)
CLASSIFIER = head(kind="classifier", classes=2, bias="learned")
POOLED = head(kind="pooled", pooler="tanh")

VIT: tuple[Row, ...] = (
    Field("num_hidden_layers", "encoder.depth"),
    Field("hidden_size", f"{B}.width"),
    Field("num_attention_heads", f"{A}.heads"),
    Field("intermediate_size", f"{F}.hidden"),
    Field("image_size", "input.image", 224),
    Field("patch_size", "input.patch", 16),
    Field("num_channels", "input.channels", 3),
    activation("hidden_act", f"{F}.activation", "gelu"),
    Field("layer_norm_eps", "**.eps", 1e-12),
    flag("qkv_bias", f"{A}.bias", True, "qkvo", "o"),
    Fixed("pooler_act", "tanh"),
    unheeded("pooler_output_size", None),
    labels(),
)


def swiglu() -> Several:
    """DINOv2: the size inside by a ratio; gated (giant) two thirds of it, rounded up to eights."""
    names = {"mlp_ratio": 4, "use_swiglu_ffn": False}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        inside, gated = int(get(tree, f"{B}.width") * given["mlp_ratio"]), bool(given["use_swiglu_ffn"])
        put(tree, f"{F}.hidden", (int(inside * 2 / 3) + 7) // 8 * 8 if gated else inside)
        put(tree, f"{F}.gated", gated)
        if gated:
            put(tree, f"{F}.activation", "silu")

    def write(tree: Tree) -> dict[str, Any]:
        width, inside, gated = get(tree, f"{B}.width"), get(tree, f"{F}.hidden"), get(tree, f"{F}.gated")
        ratios = (n for n in range(1, 65) if (int(width * n * 2 / 3) + 7) // 8 * 8 == inside)
        ratio = next(ratios, 4) if gated else inside / width
        return {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_swiglu_ffn": gated}

    return Several(names, read, write)


def is_gated(config: ModelConfig) -> bool:
    assert config.encoder is not None
    return next(config.encoder.layers()).feedforward.gated


def pooled(pooling: str, project: bool) -> Tree:
    return head(kind="pooled", pooling=pooling, project=512 if project else None)


PROJECTION = Several(
    {"projection_dim": 512},
    lambda given, tree: put(tree, "head.project", given["projection_dim"] if tree["head"]["project"] else None),
    lambda tree: {"projection_dim": get(tree, "head.project") or 512},
)
CLIP_VISION = (
    *over(without(VIT, "qkv_bias", "pooler_act", "pooler_output_size", "id2label")),
    Field("patch_size", "input.patch", 32),
    activation("hidden_act", f"{F}.activation", "quick_gelu"),
    Field("layer_norm_eps", "**.eps", 1e-5),
    Const("input.bias", False),
    Const("input.norm", VIT_LIKE.to_dict()["encoder"]["norm"]),
    Field("layer_norm_eps", "**.eps", 1e-5),
    PROJECTION,
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
    PROJECTION,
    # The class pools where it finds this id; the published vocabulary has it last.
    Several({}, lambda given, tree: None, lambda tree: {"eos_token_id": get(tree, "input.vocab") - 1}),
)


def whisper_like() -> ModelConfig:
    config = bart(vocab=8, width=8, depth=1, heads=1, context=8)
    assert config.target is not None
    target = replace(config.target, positions=replace(config.target.positions, offset=0), norm=None)  # type: ignore[type-var]
    return replace(config, input=FramesConfig(channels=8, context=8), target=target, tie="output")


WHISPER = (
    *over(
        without(bart_rows("gelu"), "max_position_embeddings"),
        Field("vocab_size", "target.vocab"),
        flag("scale_embedding", "target.scale", False, "sqrt_width", 1.0),
    ),
    Field("num_mel_bins", "input.channels", 80),
    Field("max_source_positions", "input.context", 1500),
    Field("max_target_positions", "target.context", 448),
    unheeded("max_position_embeddings", None),
    *PRE,
    Const(heads("bias"), "qvo"),
)

SENSES = (
    Family(
        kind="vit",
        start=VIT_LIKE,
        rows=VIT,
        weights=w.vit("vit"),
        classes={"ViTForImageClassification": CLASSIFIER, "ViTModel": POOLED},
        heads={"ViTForImageClassification": w.CLASSIFIER},
        prefix="vit.",
        bare=("ViTModel",),
    ),
    Family(
        kind="deit",
        start=VIT_LIKE,
        rows=(*VIT, Const("input.distillation_token", True)),
        weights=w.vit("deit"),
        classes={
            "DeiTForImageClassificationWithTeacher": CLASSIFIER | {"teacher": True},
            "DeiTForImageClassification": CLASSIFIER,
            "DeiTModel": POOLED,
        },
        heads={
            "DeiTForImageClassificationWithTeacher": w.DEIT_TEACHER,
            "DeiTForImageClassification": w.CLASSIFIER,
        },
        prefix="deit.",
        bare=("DeiTModel",),
    ),
    Family(
        kind="dinov2",
        start=VIT_LIKE,
        rows=(
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
            swiglu(),
            Field("layerscale_value", f"{B}.layer_scale", 1.0),
            Field("use_mask_token", "input.mask_token", True),
            unheeded("intermediate_size", None),
        ),
        weights=w.DINOV2,
        others=((is_gated, w.DINOV2_GATED),),
        classes={"Dinov2Model": None},
        prefix="dinov2.",
        bare=("Dinov2Model",),
    ),
    Family(
        kind="clip_vision_model",
        start=VIT_LIKE,
        rows=CLIP_VISION,
        weights=w.CLIP_VISION,
        classes={
            "CLIPVisionModel": pooled("first", project=False),
            "CLIPVisionModelWithProjection": pooled("first", project=True),
        },
        prefix="vision_model.",
        bare=("CLIPVisionModel",),
        ignored=("vision_model.embeddings.position_ids",),
    ),
    Family(
        kind="clip_text_model",
        start=TEXT_LIKE,
        rows=CLIP_TEXT,
        weights=w.CLIP_TEXT,
        classes={
            "CLIPTextModel": pooled("last", project=False),
            "CLIPTextModelWithProjection": pooled("last", project=True),
        },
        prefix="text_model.",
        bare=("CLIPTextModel",),
        ignored=("text_model.embeddings.position_ids",),
    ),
    Family(
        kind="whisper",
        start=whisper_like(),
        rows=WHISPER,
        weights=w.WHISPER,
        classes={"WhisperForConditionalGeneration": LM, "WhisperModel": None},
        prefix="model.",
        bare=("WhisperModel",),
    ),
)
