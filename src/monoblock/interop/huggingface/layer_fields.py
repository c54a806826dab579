"""Rules for config.json fields of single families, about their layers, norms, positions and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monoblock.config.model import Alibi, NormConfig, Rotary
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.config.schema import to_dict
from monoblock.interop.huggingface.config_tree import ConfigTree, get_value, set_value
from monoblock.interop.huggingface.field_rules import FieldGroup
from monoblock.interop.huggingface.rotary import rotary

BLOCK, ATTN, FFN = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"


def expert_layers(experts: str) -> FieldGroup:
    """Return the rule for the layers with experts in Qwen3-MoE.

    Every layer whose number is a multiple of decoder_sparse_step has experts, except those in mlp_only_layers.
    `experts` is the name of the field with the number of experts.
    """
    defaults = {experts: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
             "decoder_sparse_step": 1, "mlp_only_layers": (), "intermediate_size": 6144}  # fmt: skip

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        router = "softmax_renormalized" if fields["norm_topk_prob"] else "softmax"
        for n, layer in enumerate(tree["decoder"]["layers"]):
            excluded = n in (fields["mlp_only_layers"] or ())
            dense = excluded or (n + 1) % fields["decoder_sparse_step"] or not fields[experts]
            routing = {"count": fields[experts], "top_k": fields["num_experts_per_tok"], "router": router}
            layer["feedforward"]["experts"] = None if dense else routing
            layer["feedforward"]["hidden"] = fields["intermediate_size" if dense else "moe_intermediate_size"]

    def write(tree: ConfigTree) -> dict[str, Any]:
        feedforwards = [layer["feedforward"] for layer in tree["decoder"]["layers"]]
        routed = next(f for f in feedforwards if f["experts"] is not None)
        dense = next((f for f in feedforwards if f["experts"] is None), routed)
        return {
            experts: routed["experts"]["count"],
            "num_experts_per_tok": routed["experts"]["top_k"],
            "norm_topk_prob": routed["experts"]["router"] == "softmax_renormalized",
            "moe_intermediate_size": routed["hidden"],
            "intermediate_size": dense["hidden"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n, f in enumerate(feedforwards) if f["experts"] is None],
        }

    return FieldGroup(defaults, read, write)


def no_rope_layers() -> FieldGroup:
    """Return the rule for SmolLM3's no_rope_layers: 1 for a layer with rotary positions, 0 for one without."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        layers = tree["decoder"]["layers"]
        interval = fields["no_rope_layer_interval"]
        has_rope = fields["no_rope_layers"] or [(n + 1) % interval != 0 for n in range(len(layers))]
        for layer, rope in zip(layers, has_rope, strict=True):
            layer["attention"]["positions"] = layer["attention"]["positions"] if rope else None

    def write(tree: ConfigTree) -> dict[str, Any]:
        layers = tree["decoder"]["layers"]
        return {"no_rope_layers": [int(layer["attention"]["positions"] is not None) for layer in layers]}

    return FieldGroup({"no_rope_layers": None, "no_rope_layer_interval": 4}, read, write)


def qk_norm(theirs: str, axes: str, norm: NormConfig) -> FieldGroup:
    """Return the rule for the boolean field `theirs`: whether queries and keys are normalized by `norm` over `axes`."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        normed = to_dict(norm) | {"eps": get_value(tree, f"{BLOCK}.norm.eps")}
        set_value(tree, f"{ATTN}.qk_norm", normed if fields[theirs] else None)
        set_value(tree, f"{ATTN}.qk_norm_over", axes if fields[theirs] else "head")

    return FieldGroup({theirs: False}, read, lambda tree: {theirs: get_value(tree, f"{ATTN}.qk_norm") is not None})


def logit_softcap(default: float | None) -> FieldGroup:
    """Return the rule for Gemma's final_logit_softcapping, which limits the logits of the language model alone."""

    def is_language_model(tree: ConfigTree) -> bool:
        return tree["head"] is not None and tree["head"]["kind"] in VOCABULARY_HEADS

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if is_language_model(tree):
            tree["head"]["softcap"] = fields["final_logit_softcapping"]

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {"final_logit_softcapping": tree["head"]["softcap"] if is_language_model(tree) else default}

    return FieldGroup({"final_logit_softcapping": default}, read, write)


def gpt2_attention_scale() -> FieldGroup:
    """Return the rule for GPT-2's attention scale: 1 / sqrt(head size), 1 / (layer index + 1), both or neither."""
    defaults = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        for n, layer in enumerate(tree["decoder"]["layers"]):
            scale = (layer["width"] // layer["attention"]["heads"]) ** -0.5 if fields["scale_attn_weights"] else 1.0
            scale = scale / (n + 1) if fields["scale_attn_by_inverse_layer_idx"] else scale
            layer["attention"]["scale"] = None if not n and fields["scale_attn_weights"] else scale
            if fields["scale_attn_weights"] and not fields["scale_attn_by_inverse_layer_idx"]:
                layer["attention"]["scale"] = None

    def write(tree: ConfigTree) -> dict[str, Any]:
        layers = tree["decoder"]["layers"]
        first, last = layers[0]["attention"], layers[-1]["attention"]
        return {
            "scale_attn_weights": first["scale"] == first["head_dim"] ** -0.5,
            "scale_attn_by_inverse_layer_idx": first["scale"] != last["scale"],
        }

    return FieldGroup(defaults, read, write)


def gpt_neo_layers() -> FieldGroup:
    """Return the rule for GPT-Neo's attention_types, such as [[["global", "local"], 12]], and the local window."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        types = [kind for pattern, times in fields["attention_types"] for _ in range(times) for kind in pattern]
        for layer, kind in zip(tree["decoder"]["layers"], types, strict=True):
            layer["attention"]["window"] = {"global": None, "local": fields["window_size"]}[kind]

    def write(tree: ConfigTree) -> dict[str, Any]:
        windows = [layer["attention"]["window"] for layer in tree["decoder"]["layers"]]
        types = ["global" if window is None else "local" for window in windows]
        size = next((window for window in windows if window is not None), 256)
        return {"attention_types": [[types, 1]], "window_size": size}

    defaults = {"attention_types": [[["global", "local"], 12]], "window_size": 256, "attention_layers": None}
    return FieldGroup(defaults, read, write)


def mpt_attention() -> FieldGroup:
    """Return the rule for MPT's attn_config, an object inside config.json."""
    fixed = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False}
    free = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None}
    ignored = {"attn_impl", "attn_pdrop", "model_type"}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        values = fixed | free | (fields["attn_config"] or {})
        for name, value in values.items():
            if name not in {*free, *ignored} and (name not in fixed or value != fixed[name]):
                raise KeyError(f"attn_config.{name}={value!r} is not supported")
        if not values["alibi"]:
            raise KeyError("attn_config.alibi must be true: MPT in transformers has no other positions")
        set_value(tree, f"{ATTN}.positions", to_dict(Alibi(max_bias=values["alibi_bias_max"])))
        set_value(tree, f"{ATTN}.clip", values["clip_qkv"])
        set_value(tree, f"{ATTN}.scale", values["softmax_scale"])

    def write(tree: ConfigTree) -> dict[str, Any]:
        attention = tree["decoder"]["layers"][0]["attention"]
        is_default_scale = attention["scale"] == attention["head_dim"] ** -0.5
        values = {
            "alibi": True,
            "alibi_bias_max": attention["positions"]["max_bias"],
            "clip_qkv": attention["clip"],
            "softmax_scale": None if is_default_scale else attention["scale"],
        }
        return {"attn_config": values}

    return FieldGroup({"attn_config": None}, read, write)


def falcon_layers() -> FieldGroup:
    """Return the rule for Falcon's three structures.

    7B: one key/value head, one norm; 40B: several key/value heads, two norms; RW: ALiBi.
    """
    defaults = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False,
             "num_kv_heads": None, "num_ln_in_parallel_attn": None}  # fmt: skip

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        new, heads = fields["new_decoder_architecture"], get_value(tree, f"{ATTN}.heads")
        kv_heads = 1 if fields["multi_query"] and not new else fields["num_kv_heads"] or heads
        norms = fields["num_ln_in_parallel_attn"] or (2 if new else 1)
        parallel = "parallel" if new and norms == 2 else "parallel_shared"
        if new and not fields["parallel_attn"]:
            raise KeyError("new_decoder_architecture=true requires parallel_attn=true")
        set_value(tree, f"{ATTN}.kv_heads", kv_heads)
        set_value(tree, f"{BLOCK}.residual", parallel if fields["parallel_attn"] else "sequential")
        set_value(tree, f"{ATTN}.positions", to_dict(Alibi(form="falcon") if fields["alibi"] else Rotary()))

    def write(tree: ConfigTree) -> dict[str, Any]:
        layer = tree["decoder"]["layers"][0]
        heads, kv_heads = layer["attention"]["heads"], layer["attention"]["kv_heads"]
        new = layer["residual"] == "parallel" or kv_heads not in (1, heads)
        return {
            "new_decoder_architecture": new,
            "multi_query": kv_heads == 1 and not new,
            "parallel_attn": layer["residual"] != "sequential",
            "alibi": layer["attention"]["positions"]["kind"] == "alibi",
            "num_kv_heads": kv_heads,
            "num_ln_in_parallel_attn": (2 if layer["residual"] == "parallel" else 1) if new else None,
        }

    return FieldGroup(defaults, read, write)


def falcon_rotary() -> FieldGroup:
    """Return the rule that converts Falcon's rotary positions; it changes nothing in a model with ALiBi."""
    rule = rotary()

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if get_value(tree, f"{ATTN}.positions")["kind"] == "rotary":
            rule.read(fields, tree)

    def write(tree: ConfigTree) -> dict[str, Any]:
        return rule.write(tree) if get_value(tree, f"{ATTN}.positions")["kind"] == "rotary" else {}

    return FieldGroup(rule.defaults, read, write)


def opt_norms() -> FieldGroup:
    """Return the rule for OPT's norms: before each sublayer and at the end, or after each sublayer (350m)."""
    defaults = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        norm = to_dict(NormConfig(affine="scale_shift" if fields["layer_norm_elementwise_affine"] else "none"))
        before = fields["do_layer_norm_before"]
        set_value(tree, f"{BLOCK}.norm", norm)
        set_value(tree, f"{BLOCK}.norm_place", "pre" if before else "post")
        set_value(tree, "decoder.norm", norm if before and not fields["_remove_final_layer_norm"] else None)

    def write(tree: ConfigTree) -> dict[str, Any]:
        before = get_value(tree, f"{BLOCK}.norm_place") == "pre"
        return {
            "do_layer_norm_before": before,
            "_remove_final_layer_norm": before and get_value(tree, "decoder.norm") is None,
            "layer_norm_elementwise_affine": get_value(tree, f"{BLOCK}.norm.affine") != "none",
        }

    return FieldGroup(defaults, read, write)


def opt_embedding_size() -> FieldGroup:
    """Return the rule for OPT's word_embed_proj_dim, the size of the embedding if it is not the width."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        size, width = fields["word_embed_proj_dim"], get_value(tree, f"{BLOCK}.width")
        set_value(tree, "input.dim", None if size in (None, width) else size)

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {"word_embed_proj_dim": get_value(tree, "input.dim") or get_value(tree, f"{BLOCK}.width")}

    return FieldGroup({"word_embed_proj_dim": None}, read, write)


def all_biases(theirs: str) -> FieldGroup:
    """Return the rule for the boolean field `theirs`: whether attention and feed-forward layers have biases."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, f"{ATTN}.bias", "qkvo" if fields[theirs] else "")
        set_value(tree, f"{FFN}.bias", bool(fields[theirs]))

    return FieldGroup({theirs: True}, read, lambda tree: {theirs: get_value(tree, f"{FFN}.bias")})
