"""Rules for config.json fields whose values must be converted: activations, scales, sizes, labels, layer types.

Each function returns a rule (see field_rules.py), so that a family can be described by a table of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.config_tree import ConfigTree, get_value, set_value
from monoblock.interop.huggingface.field_rules import Field, FieldGroup
from monoblock.untrusted_files import short_repr

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


def activation(theirs: str, ours: str, default: str) -> Field:
    return Field(theirs, ours, default, read_activation, lambda name: write_activation(name, default))


def flag(theirs: str, ours: str, default: bool, yes: Any, no: Any) -> Field:
    """Return the rule for a boolean field that sets our value `yes` if it is true and `no` if it is false.

    Strings are compared as sets of letters, since our `bias` may be written as "qkvo" or "ovkq".
    """

    def write(value: Any) -> bool:
        return sorted(value) == sorted(yes) if isinstance(value, str) and isinstance(yes, str) else value == yes

    return Field(theirs, ours, default, lambda enabled: yes if enabled else no, write)


def inverse_sqrt(theirs: str, ours: str, default: float) -> Field:
    """Return the rule for a field whose square root divides the attention scores; our value is the scale, 1 / sqrt."""

    def read(number: float) -> float:
        if not number > 0:
            raise ConfigError(f"{theirs}={short_repr(number)} must be above 0: its square root divides the scores")
        return number**-0.5

    return Field(theirs, ours, default, read, lambda scale: int_if_whole(scale**-2))


def inverse(theirs: str, ours: str, default: float) -> Field:
    return Field(theirs, ours, default, lambda n: 1.0 / n, lambda scale: int_if_whole(1.0 / scale))


def int_if_whole(number: float) -> float | int:
    """Return the nearest integer if the number equals it up to rounding errors, else the number itself."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def feedforward_size(theirs: str, ours: str, width: str, default: Any = None) -> FieldGroup:
    """Return the rule for the hidden size of feed-forward layers, which is 4 times the width if the field is None."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, ours, fields[theirs] if fields[theirs] is not None else 4 * get_value(tree, width))

    return FieldGroup({theirs: default}, read, lambda tree: {theirs: get_value(tree, ours)})


def feedforward_ratio(ours: str, width: str, **ratio_field: int) -> FieldGroup:
    """Return the rule for a hidden size that is a multiple of the width.

    The multiple is 4, or the field given as keyword argument with its default, such as expansion_ratio=4.
    """
    ((name, ratio),) = ratio_field.items() or [("", 4)]
    defaults = {name: ratio} if name else {}

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, ours, int(get_value(tree, width) * fields.get(name, ratio)))

    def write(tree: ConfigTree) -> dict[str, Any]:
        return {name: int_if_whole(get_value(tree, ours) / get_value(tree, width))} if name else {}

    return FieldGroup(defaults, read, write)


def unused_field(theirs: str, default: Any) -> FieldGroup:
    """Return the rule for a field that exists in transformers but has no effect there."""
    return FieldGroup({theirs: default}, lambda fields, tree: None, lambda tree: {})


MULTI_LABEL = "multi_label_classification"


def num_labels() -> FieldGroup:
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

    return FieldGroup({"id2label": None, "num_labels": None, "label2id": None, "problem_type": None}, read, write)


def offset_positions(context: str, offset: str, default: int) -> FieldGroup:
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

    return FieldGroup(defaults, read, write)


# -- layer types ------------------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
LayerTypes = Callable[[Mapping[str, Any], int], Sequence[str]]


def every_nth(interval: int, which: str, others: str, *, first: bool = False) -> LayerTypes:
    """Return a function that gives the type of each layer: `which` for one of every `interval` layers, else `others`.

    It is the last layer of the interval, or the first if `first` is True.
    """
    return lambda fields, depth: [which if (n + (0 if first else 1)) % interval == 0 else others for n in range(depth)]


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
) -> FieldGroup:
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

    return FieldGroup({window: default, "layer_types": None, **switch, **extra_fields}, read, write)


def optional_window(ours: str, default: int) -> FieldGroup:
    """Return the rule for a sliding window in all layers, which use_sliding_window turns on or off."""

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, ours, fields["sliding_window"] if fields["use_sliding_window"] else None)

    def write(tree: ConfigTree) -> dict[str, Any]:
        size = get_value(tree, ours)
        return {"use_sliding_window": size is not None, "sliding_window": size}

    return FieldGroup({"use_sliding_window": False, "sliding_window": default, "max_window_layers": 28}, read, write)
