"""The config.json fields of ModernBERT, and the layers of its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monoblock.config.model import NormConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.interop.huggingface.config_tree import ConfigTree, get_value, set_value
from monoblock.interop.huggingface.field_converters import (
    FULL,
    SLIDING,
    activation,
    every_nth,
    flag,
    layer_types,
    num_labels,
    read_activation,
    unused_field,
    write_activation,
)
from monoblock.interop.huggingface.field_rules import Field, FieldGroup, FixedField
from monoblock.interop.huggingface.rotary import rotary

BLOCK, ATTN, FFN = "encoder.*", "encoder.*.attention", "encoder.*.feedforward"


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
