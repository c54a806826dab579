"""The rules for fields of a config.json, one function each, from which the tables of the families are made.

First those for any field, then those for values that must be converted: activations, sizes, labels, layer types, rotary
positions.  Each function returns a `FieldRule` (see field_rules.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoblock.config.model import Alibi, NormConfig, Rotary
from monoblock.config.parts import HEADS_WITH_CLASSES, VOCABULARY_HEADS
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.field_rules import MISSING, ConfigTree, FieldRule, get_value, set_value
from monoblock.untrusted_files import short_repr

BLOCK, ATTN, FFN = "decoder.*", "decoder.*.attention", "decoder.*.feedforward"


def field(
    theirs: str,
    ours: str,
    default: Any = MISSING,
    to_ours: Callable[[Any], Any] = lambda value: value,
    to_theirs: Callable[[Any], Any] = lambda value: value,
) -> FieldRule:
    """Return the rule for the Hugging Face field `theirs`, which sets one value of our configuration.

    `ours` is one path or several, separated by spaces; writing takes the value at the first.
    """

    def write(tree: ConfigTree) -> dict[str, Any]:
        value = get_value(tree, ours)
        return {theirs: default if value is MISSING else to_theirs(value)}

    return FieldRule({theirs: default}, lambda fields, tree: set_value(tree, ours, to_ours(fields[theirs])), write)


def constant(ours: str, value: Any) -> FieldRule:
    """Return the rule for a value of our configuration, at the path `ours`, that is the same in the whole family."""
    return FieldRule({}, lambda fields, tree: set_value(tree, ours, value), lambda tree: {})


def fixed_field(theirs: str, value: Any, *equivalents: Any) -> FieldRule:
    """Return the rule for the Hugging Face field `theirs`, which must have this value or one of its `equivalents`."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if fields[theirs] not in (value, *equivalents):
            raise ConfigError(f"{theirs}={short_repr(fields[theirs])} is not supported; only {short_repr(value)} is")

    return FieldRule({theirs: value}, read, lambda tree: {theirs: value})


def unused_field(theirs: str, default: Any) -> FieldRule:
    """Return the rule for a field that exists in transformers but has no effect there."""
    return FieldRule({theirs: default}, lambda fields, tree: None, lambda tree: {})


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}


def read_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"the activation {short_repr(name)} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def write_activation(ours: str, default: str) -> str:
    """Return the Hugging Face name of our activation `ours`; among several names, prefer the family's `default`."""
    if ACTIVATIONS.get(default) == ours:
        return default
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def activation(theirs: str, ours: str, default: str) -> FieldRule:
    return field(theirs, ours, default, read_activation, lambda name: write_activation(name, default))


def flag(theirs: str, ours: str, default: bool, yes: Any, no: Any) -> FieldRule:
    """Return the rule for a boolean field that sets our value `yes` if it is true and `no` if it is false.

    Strings are compared as sets of letters, since our `bias` may be written as "qkvo" or "ovkq".
    """

    def write(value: Any) -> bool:
        return sorted(value) == sorted(yes) if isinstance(value, str) and isinstance(yes, str) else value == yes

    return field(theirs, ours, default, lambda enabled: yes if enabled else no, write)


def inverse_sqrt(theirs: str, ours: str, default: float) -> FieldRule:
    """Return the rule for a field whose square root divides the attention scores; our value is the scale, 1 / sqrt."""

    def read(number: float) -> float:
        if not number > 0:
            raise ConfigError(f"{theirs}={short_repr(number)} must be above 0: its square root divides the scores")
        return number**-0.5

    return field(theirs, ours, default, read, lambda scale: int_if_whole(scale**-2))


def inverse(theirs: str, ours: str, default: float) -> FieldRule:
    return field(theirs, ours, default, lambda n: 1.0 / n, lambda scale: int_if_whole(1.0 / scale))


def int_if_whole(number: float) -> float | int:
    """Return the nearest integer if the number equals it up to rounding errors, else the number itself."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def feedforward_size(theirs: str) -> FieldRule:
    """Return the rule for the hidden size of feed-forward layers in a decoder: if None, 4 times the width."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        size = fields[theirs]
        set_value(tree, f"{FFN}.hidden", 4 * get_value(tree, f"{BLOCK}.width") if size is None else size)

    return FieldRule({theirs: None}, read, lambda tree: {theirs: get_value(tree, f"{FFN}.hidden")})


def feedforward_ratio(theirs: str | None = None) -> FieldRule:
    """Return the rule for a hidden size that is a multiple of the width: 4 times, unless the field `theirs` differs."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        ratio = 4 if theirs is None else fields[theirs]
        set_value(tree, f"{FFN}.hidden", int(get_value(tree, f"{BLOCK}.width") * ratio))

    def write(tree: ConfigTree) -> dict[str, Any]:
        ratio = get_value(tree, f"{FFN}.hidden") / get_value(tree, f"{BLOCK}.width")
        return {} if theirs is None else {theirs: int_if_whole(ratio)}

    return FieldRule({} if theirs is None else {theirs: 4}, read, write)


def biases(theirs: str, default: bool) -> tuple[FieldRule, FieldRule]:
    """Return the rules for the field `theirs`: whether a decoder's attention and feed-forward layers have biases."""
    return flag(theirs, f"{ATTN}.bias", default, "qkvo", ""), field(theirs, f"{FFN}.bias", default, bool)


MULTI_LABEL = "multi_label_classification"


def num_labels() -> FieldRule:
    """Return the rule for the number of classes (num_labels, id2label) and what they are (problem_type)."""

    def has_labels(head: ConfigTree | None) -> bool:
        """Return whether the fields state the number of classes; ELECTRA's discriminator, a tagger, always has one."""
        if head is None or head["kind"] not in HEADS_WITH_CLASSES:
            return False
        return head["kind"] != "tagger" or head["classes"] != 1

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        head = tree["head"]
        if has_labels(head):
            id2label = fields["id2label"]
            head["classes"] = fields["num_labels"] or (len(id2label) if isinstance(id2label, dict) else 2)
            if fields["problem_type"] == "regression" and head["kind"] == "classifier" and not head["teacher"]:
                head["kind"] = "regression"
            if head["kind"] == "classifier":
                head["multi_label"] = fields["problem_type"] == MULTI_LABEL

    def write(tree: ConfigTree) -> dict[str, Any]:
        head = tree["head"]
        if not has_labels(head):
            return {}
        labels = [f"LABEL_{n}" for n in range(head["classes"])]
        fields = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        problem = "regression" if head["kind"] == "regression" else MULTI_LABEL if head["multi_label"] else None
        return fields | ({} if problem is None else {"problem_type": problem})

    return FieldRule({"id2label": None, "num_labels": None, "label2id": None, "problem_type": None}, read, write)


def offset_positions(context: str, offset: str, default: int) -> FieldRule:
    """Return the rule for RoBERTa's positions: they start at pad_token_id + 1, but the table has rows from 0 on."""
    defaults = {"max_position_embeddings": default, "pad_token_id": 1}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        first = fields["pad_token_id"] + 1
        set_value(tree, offset, first)
        set_value(tree, context, fields["max_position_embeddings"] - first)

    def write(tree: ConfigTree) -> dict[str, Any]:
        first = get_value(tree, offset)
        if first == 0:
            raise ConfigError("this family cannot express positions that start at 0 instead of at pad_token_id + 1")
        return {"max_position_embeddings": get_value(tree, context) + first, "pad_token_id": first - 1}

    return FieldRule(defaults, read, write)


# -- layer types ------------------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
LayerTypes = Callable[[Mapping[str, Any], int], Sequence[str]]


def every_nth(interval: int | str, which: str, others: str, *, first: bool = False) -> LayerTypes:
    """Return a function that gives the type of each layer: `which` for one of every `interval` layers, else `others`.

    It is the last layer of the interval, or the first if `first` is True.  A str is the field with the interval.
    """

    def types(fields: Mapping[str, Any], depth: int) -> Sequence[str]:
        count = fields[interval] if isinstance(interval, str) else interval
        return [which if (n + (0 if first else 1)) % count == 0 else others for n in range(depth)]

    return types


def qwen_layer_types(fields: Mapping[str, Any], depth: int) -> Sequence[str]:
    """Return Qwen's layer types: layers with index max_window_layers or more have a sliding window."""
    enabled = fields["use_sliding_window"] and fields["sliding_window"] is not None
    return [SLIDING if enabled and n >= fields["max_window_layers"] else FULL for n in range(depth)]


def layer_types(
    stack: str,
    default_types: LayerTypes,
    *,
    window: str = "sliding_window",
    default: int | None = None,
    to_ours: Callable[[int], int] = lambda size: size,
    to_theirs: Callable[[int], int] = lambda size: size,
    has_switch: bool = False,
    **extra_fields: Any,
) -> FieldRule:
    """Return the rule for which layers have a sliding window, and for its size.

    default_types: a function of (fields, depth) that returns the layer types if a file has no field layer_types.
    window: the name of the field with the window size; default: its default.
    to_ours, to_theirs: convert the window size.
    has_switch: whether the family has the field use_sliding_window.
    extra_fields: further fields that `default_types` uses, with their defaults.
    """
    switch = {"use_sliding_window": False} if has_switch else {}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        layers = tree[stack]["layers"]
        types = fields["layer_types"] if fields["layer_types"] is not None else default_types(fields, len(layers))
        if len(types) != len(layers) or set(types) - {FULL, SLIDING}:
            raise ConfigError(
                f"layer_types={short_repr(types)} must be {FULL} or {SLIDING} for each of the {len(layers)} layers"
            )
        size = fields[window] if fields.get("use_sliding_window", True) else None
        for layer, layer_type in zip(layers, types, strict=True):
            layer["attention"]["window"] = to_ours(size) if layer_type == SLIDING and size is not None else None

    def write(tree: ConfigTree) -> dict[str, Any]:
        windows = [layer["attention"]["window"] for layer in tree[stack]["layers"]]
        size = next((w for w in windows if w is not None), None)
        fields: dict[str, Any] = {"layer_types": [FULL if w is None else SLIDING for w in windows]}
        fields[window] = default if size is None else to_theirs(size)
        return fields | ({"use_sliding_window": size is not None} if has_switch else {})

    return FieldRule({window: default, "layer_types": None, **switch, **extra_fields}, read, write)


def optional_window() -> FieldRule:
    """Return the rule for a sliding window in all layers, which use_sliding_window turns on or off."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, f"{ATTN}.window", fields["sliding_window"] if fields["use_sliding_window"] else None)

    def write(tree: ConfigTree) -> dict[str, Any]:
        size = get_value(tree, f"{ATTN}.window")
        return {"use_sliding_window": size is not None, "sliding_window": size}

    return FieldRule({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, read, write)


# -- fields of layers --------------------------------------------------------------------------------------------------


def expert_layers() -> FieldRule:
    """Return the rule for the layers with experts in Qwen3-MoE.

    Every layer whose number is a multiple of decoder_sparse_step has experts, except those in mlp_only_layers.
    """
    defaults: dict[str, Any] = {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    defaults |= {"intermediate_size": 6144, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        router = "softmax_renormalized" if fields["norm_topk_prob"] else "softmax"
        for n, layer in enumerate(tree["decoder"]["layers"]):
            excluded = n in (fields["mlp_only_layers"] or ())
            dense = excluded or (n + 1) % fields["decoder_sparse_step"] or not fields["num_local_experts"]
            routing = {"count": fields["num_local_experts"], "top_k": fields["num_experts_per_tok"], "router": router}
            layer["feedforward"]["experts"] = None if dense else routing
            layer["feedforward"]["hidden"] = fields["intermediate_size" if dense else "moe_intermediate_size"]

    def write(tree: ConfigTree) -> dict[str, Any]:
        feedforwards = [layer["feedforward"] for layer in tree["decoder"]["layers"]]
        routed = next(f for f in feedforwards if f["experts"] is not None)
        dense = next((f for f in feedforwards if f["experts"] is None), routed)
        return {
            "num_local_experts": routed["experts"]["count"],
            "num_experts_per_tok": routed["experts"]["top_k"],
            "norm_topk_prob": routed["experts"]["router"] == "softmax_renormalized",
            "moe_intermediate_size": routed["hidden"],
            "intermediate_size": dense["hidden"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n, f in enumerate(feedforwards) if f["experts"] is None],
        }

    return FieldRule(defaults, read, write)


def no_rope_layers() -> FieldRule:
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

    return FieldRule({"no_rope_layers": None, "no_rope_layer_interval": 4}, read, write)


def qk_norm(theirs: str, axes: str, norm: NormConfig, default: bool = False) -> FieldRule:
    """Return the rule for the boolean field `theirs`: whether queries and keys are normalized by `norm` over `axes`."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        normed = to_dict(norm) | {"eps": get_value(tree, f"{BLOCK}.norm.eps")}
        set_value(tree, f"{ATTN}.qk_norm", normed if fields[theirs] else None)
        set_value(tree, f"{ATTN}.qk_norm_over", axes if fields[theirs] else "head")

    return FieldRule({theirs: default}, read, lambda tree: {theirs: get_value(tree, f"{ATTN}.qk_norm") is not None})


def logit_softcap(default: float | None) -> FieldRule:
    """Return the rule for Gemma's final_logit_softcapping, which limits the logits of the language model alone."""

    def is_language_model(tree: ConfigTree) -> bool:
        return tree["head"] is not None and tree["head"]["kind"] in VOCABULARY_HEADS

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if is_language_model(tree):
            tree["head"]["softcap"] = fields["final_logit_softcapping"]

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {"final_logit_softcapping": tree["head"]["softcap"] if is_language_model(tree) else default}

    return FieldRule({"final_logit_softcapping": default}, read, write)


def gpt2_attention_scale() -> FieldRule:
    """Return the rule for GPT-2's attention scale: 1 / sqrt(head size), 1 / (layer index + 1), both or neither."""
    defaults = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        by_index = fields["scale_attn_by_inverse_layer_idx"]
        for n, layer in enumerate(tree["decoder"]["layers"], 1):
            scale = (layer["width"] // layer["attention"]["heads"]) ** -0.5 if fields["scale_attn_weights"] else 1.0
            is_default = fields["scale_attn_weights"] and (n == 1 or not by_index)
            layer["attention"]["scale"] = None if is_default else scale / n if by_index else scale

    def write(tree: ConfigTree) -> dict[str, Any]:
        layers = tree["decoder"]["layers"]
        first, last = layers[0]["attention"], layers[-1]["attention"]
        return {
            "scale_attn_weights": first["scale"] == first["head_dim"] ** -0.5,
            "scale_attn_by_inverse_layer_idx": first["scale"] != last["scale"],
        }

    return FieldRule(defaults, read, write)


def gpt_neo_layers() -> FieldRule:
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
    return FieldRule(defaults, read, write)


def mpt_attention() -> FieldRule:
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

    return FieldRule({"attn_config": None}, read, write)


def falcon_layers() -> FieldRule:
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

    return FieldRule(defaults, read, write)


def opt_final_norm() -> FieldRule:
    """Return the rule for OPT's norm at the end: none if norms come after each sublayer (350m), or if it is removed."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if fields["_remove_final_layer_norm"] or not fields["do_layer_norm_before"]:
            tree["decoder"]["norm"] = None

    def write(tree: ConfigTree) -> dict[str, Any]:
        before = get_value(tree, f"{BLOCK}.norm_place") == "pre"
        return {"do_layer_norm_before": before, "_remove_final_layer_norm": before and tree["decoder"]["norm"] is None}

    return FieldRule({"do_layer_norm_before": True, "_remove_final_layer_norm": False}, read, write)


def opt_embedding_size() -> FieldRule:
    """Return the rule for OPT's word_embed_proj_dim, the size of the embedding if it is not the width."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        size, width = fields["word_embed_proj_dim"], get_value(tree, f"{BLOCK}.width")
        set_value(tree, "input.dim", None if size in (None, width) else size)

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {"word_embed_proj_dim": get_value(tree, "input.dim") or get_value(tree, f"{BLOCK}.width")}

    return FieldRule({"word_embed_proj_dim": None}, read, write)


# -- rotary positions --------------------------------------------------------------------------------------------------

ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
           "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor",
           "short_factor", "long_factor", "mscale", "mscale_all_dim", "finetuned"}  # fmt: skip
SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
)


def rotary(
    stack: str = "decoder",
    base: float = 10_000.0,
    partial: float | None = None,
    *,
    layer_bases: tuple[float, float] | None = None,
    original_context: int | None = None,
    theta_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
    full_theta_key: str | None = None,
    sliding_theta_key: str | None = None,
) -> FieldRule:
    """Return the rule for the fields of rotary positions: rope_parameters; in older files rope_theta and rope_scaling.

    base: the default base of the frequencies (rope_theta).
    partial: the default fraction of a head that is rotated; None if the family always rotates whole heads.
    layer_bases: the default bases of layers with full attention and with a sliding window, if the family has both.
    original_context: the default of original_max_position_embeddings, if the family has it as a separate field.
    theta_key, fraction_key, full_theta_key, sliding_theta_key: the names, in older files, of the fields with the base,
    the fraction, and the bases of layers with full attention and with a sliding window.
    """
    theta_keys = {FULL: full_theta_key or theta_key, SLIDING: sliding_theta_key or theta_key}
    keys = ("rope_parameters", "rope_scaling", theta_key, fraction_key, *theta_keys.values())
    defaults: dict[str, Any] = dict.fromkeys((*keys, "rope_theta", "partial_rotary_factor"))
    defaults["original_max_position_embeddings"] = original_context

    def parameters(fields: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
        """Return the rotary parameters of one layer type: those in the file, else the family's defaults."""
        rope = fields["rope_parameters"] or {}
        if FULL in rope or SLIDING in rope:
            rope = rope.get(layer_type) or {}
        elif fields["rope_scaling"] and not (layer_bases and layer_type == SLIDING):
            rope = fields["rope_scaling"]
        unknown = set(rope) - ROPE_KEYS
        if unknown:
            raise ConfigError(f"the rotary parameter {short_repr(min(unknown))} is not supported")
        rope = {key: value for key, value in rope.items() if value is not None}
        default_base = base if layer_bases is None else layer_bases[layer_type == SLIDING]
        rope_theta = fields["rope_theta"] if layer_bases is None else None
        bases = (rope.get("rope_theta"), fields[theta_keys[layer_type]], rope_theta, default_base)
        fractions = (rope.get("partial_rotary_factor"), fields[fraction_key], fields["partial_rotary_factor"], partial)
        fraction = next((fraction for fraction in fractions if fraction is not None), 1.0)
        if partial is None and fraction != 1.0:
            raise ConfigError(
                f"partial_rotary_factor={short_repr(fraction)} is not supported: this family always rotates whole heads"
            )
        rope_theta = next(base for base in bases if base is not None)
        return {**rope, "rope_theta": rope_theta, "partial_rotary_factor": fraction}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        context = get_value(tree, "input.context")
        for layer in tree[stack]["layers"]:
            attention, head_dim = layer["attention"], head_dim_of(layer)
            rope = parameters(fields, FULL if attention["window"] is None else SLIDING)
            dim = int(head_dim * rope["partial_rotary_factor"])
            attention["positions"] = {
                "kind": "rotary",
                "base": rope["rope_theta"],
                "dim": None if dim == head_dim else dim,
                "layout": attention["positions"]["layout"],
                "scaling": _read_scaling(rope, context, fields["original_max_position_embeddings"]),
            }

    def write(tree: ConfigTree) -> dict[str, Any]:
        layers = [layer for layer in tree[stack]["layers"] if layer["attention"]["positions"] is not None]
        by_type = {FULL if layer["attention"]["window"] is None else SLIDING: _write_rope(layer) for layer in layers}
        if not by_type:
            raise ConfigError("the model's positions are not rotary")
        if layer_bases is not None:
            stated = ({"rope_type": "default", "rope_theta": base} for base in layer_bases)
            return {"rope_parameters": dict(zip((FULL, SLIDING), stated, strict=True)) | by_type}
        rope = by_type.get(FULL) or by_type[SLIDING]
        whole_head = {} if partial in (None, 1.0) else {"partial_rotary_factor": 1.0}
        original = rope.get("original_max_position_embeddings", original_context)
        context = {} if original_context is None else {"original_max_position_embeddings": original}
        return {"rope_parameters": whole_head | rope} | context

    return FieldRule(defaults, read, write)


def falcon_rotary() -> FieldRule:
    """Return the rule that converts Falcon's rotary positions; it changes nothing in a model with ALiBi."""
    rule = rotary()

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if get_value(tree, f"{ATTN}.positions")["kind"] == "rotary":
            rule.read(fields, tree)

    def write(tree: ConfigTree) -> dict[str, Any]:
        return rule.write(tree) if get_value(tree, f"{ATTN}.positions")["kind"] == "rotary" else {}

    return FieldRule(rule.defaults, read, write)


def head_dim_of(layer: ConfigTree) -> int:
    attention = layer["attention"]
    return attention["head_dim"] or layer["width"] // attention["heads"]


def _write_rope(layer: ConfigTree) -> dict[str, Any]:
    """Return the field rope_parameters for one layer."""
    positions, head_dim = layer["attention"]["positions"], head_dim_of(layer)
    if positions is None or positions["kind"] != "rotary":
        raise ConfigError("the model's positions are not rotary")
    fraction = (positions["dim"] or head_dim) / head_dim
    # Reading truncates head_dim * fraction.  If a rounding error would lose a dimension, take the next larger number.
    fraction = fraction if int(head_dim * fraction) == positions["dim"] else math.nextafter(fraction, 2)
    rope = {"rope_theta": positions["base"], **_write_scaling(positions["scaling"])}
    return rope if positions["dim"] == head_dim else rope | {"partial_rotary_factor": fraction}


def _read_scaling(rope: Mapping[str, Any], context: int, original: int | None) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        raise ConfigError(f"the rotary scaling {short_repr(kind)} is not supported")
    scaling: dict[str, Any] = {"kind": kind} | {key: rope[key] for key in SCALING_KEYS if rope.get(key) is not None}
    if kind == "dynamic":
        scaling["original_context"] = context
    elif kind != "linear":
        scaling["original_context"] = original or rope.get("original_max_position_embeddings") or context
    if kind in ("longrope", "yarn"):
        scaling.setdefault("factor", context / scaling["original_context"])
    if kind == "longrope":
        scaling |= {"short_factors": rope["short_factor"], "long_factors": rope["long_factor"]}
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim") and "attention_factor" not in scaling:
        mscale, all_dim = (0.1 * rope[key] * math.log(scaling["factor"]) + 1.0 for key in ("mscale", "mscale_all_dim"))
        scaling["attention_factor"] = mscale / all_dim if scaling["factor"] > 1 else 1.0
    return scaling


def _write_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    kind = scaling["kind"]
    needed = {
        "linear": SCALING_KEYS[:1],
        "dynamic": SCALING_KEYS[:1],
        "llama3": SCALING_KEYS[:3],
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "longrope": ("factor", "attention_factor"),
    }
    if kind not in needed:
        raise ConfigError(f"the rotary scaling {kind!r} does not exist in Hugging Face models")
    rope = {"rope_type": kind} | {key: scaling[key] for key in needed[kind] if scaling[key] is not None}
    if kind not in ("linear", "dynamic"):
        rope["original_max_position_embeddings"] = scaling["original_context"]
    if kind == "longrope":
        rope |= {"short_factor": list(scaling["short_factors"]), "long_factor": list(scaling["long_factors"])}
    return rope
