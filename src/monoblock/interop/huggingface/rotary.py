"""Rules for the config.json fields of rotary positions: rope_parameters; in older files rope_theta and rope_scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monoblock.errors import ConfigError
from monoblock.interop.huggingface.field_converters import FULL, SLIDING
from monoblock.interop.huggingface.field_rules import ConfigTree, FieldGroup, get_value
from monoblock.untrusted_files import short_repr

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


def _head_dim(layer: ConfigTree) -> int:
    attention = layer["attention"]
    return attention["head_dim"] or layer["width"] // attention["heads"]


@dataclass(frozen=True)
class _RotaryFields:
    """The rotary fields in the config.json of one family; the arguments of `rotary` explain them."""

    stack: str
    base: float
    partial: float | None
    layer_bases: tuple[float, float] | None
    original_context: int | None
    fraction_key: str
    full_theta_key: str
    sliding_theta_key: str

    def read(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        context = get_value(tree, "input.context")
        for layer in tree[self.stack]["layers"]:
            attention, head_dim = layer["attention"], _head_dim(layer)
            rope = self._parameters_for(fields, FULL if attention["window"] is None else SLIDING)
            dim = int(head_dim * rope["partial_rotary_factor"])
            attention["positions"] = {
                "kind": "rotary",
                "base": rope["rope_theta"],
                "dim": None if dim == head_dim else dim,
                "layout": attention["positions"]["layout"],
                "scaling": _read_scaling(rope, context, fields["original_max_position_embeddings"]),
            }

    def _parameters_for(self, fields: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
        """Return the rotary parameters of one layer type: those in the file, else the family's defaults."""
        rope = self._stored_parameters(fields, layer_type)
        unknown = set(rope) - ROPE_KEYS
        if unknown:
            raise ConfigError(f"the rotary parameter {short_repr(min(unknown))} is not supported")
        default_base = self.base if self.layer_bases is None else self.layer_bases[layer_type == SLIDING]
        rope_theta = fields["rope_theta"] if self.layer_bases is None else None
        theta_key = self.sliding_theta_key if layer_type == SLIDING else self.full_theta_key
        bases = (fields[theta_key], rope_theta, default_base)
        fractions = (fields[self.fraction_key], fields["partial_rotary_factor"], self.partial, 1.0)
        defaults = {"rope_theta": next(base for base in bases if base is not None)}
        defaults["partial_rotary_factor"] = next(fraction for fraction in fractions if fraction is not None)
        parameters = defaults | {key: value for key, value in rope.items() if value is not None}
        if self.partial is None and parameters["partial_rotary_factor"] != 1.0:
            fraction = short_repr(parameters["partial_rotary_factor"])
            raise ConfigError(
                f"partial_rotary_factor={fraction} is not supported: this family always rotates whole heads"
            )
        return parameters

    def _stored_parameters(self, fields: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
        rope = fields["rope_parameters"] or {}
        if FULL in rope or SLIDING in rope:
            return rope.get(layer_type) or {}
        if fields["rope_scaling"] and not (self.layer_bases and layer_type == SLIDING):
            return fields["rope_scaling"]
        return rope

    def write(self, tree: ConfigTree) -> dict[str, Any]:
        layers = [layer for layer in tree[self.stack]["layers"] if layer["attention"]["positions"] is not None]
        if not layers:
            raise ConfigError("the model's positions are not rotary")
        by_type = {
            FULL if layer["attention"]["window"] is None else SLIDING: _layer_parameters(layer) for layer in layers
        }
        if self.layer_bases is not None:
            defaults = ({"rope_type": "default", "rope_theta": base} for base in self.layer_bases)
            return {"rope_parameters": dict(zip((FULL, SLIDING), defaults, strict=True)) | by_type}
        rope = by_type.get(FULL) or by_type[SLIDING]
        whole_head = {} if self.partial in (None, 1.0) else {"partial_rotary_factor": 1.0}
        original = rope.get("original_max_position_embeddings", self.original_context)
        context = {} if self.original_context is None else {"original_max_position_embeddings": original}
        return {"rope_parameters": whole_head | rope} | context


def _layer_parameters(layer: ConfigTree) -> dict[str, Any]:
    """Return the field rope_parameters for one layer."""
    positions, head_dim = layer["attention"]["positions"], _head_dim(layer)
    if positions is None or positions["kind"] != "rotary":
        raise ConfigError("the model's positions are not rotary")
    fraction = (positions["dim"] or head_dim) / head_dim
    # Reading truncates head_dim * fraction.  If a rounding error would lose a dimension, take the next larger number.
    fraction = fraction if int(head_dim * fraction) == positions["dim"] else math.nextafter(fraction, 2)
    rope = {"rope_theta": positions["base"], **_write_scaling(positions["scaling"])}
    return rope if positions["dim"] == head_dim else rope | {"partial_rotary_factor": fraction}


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
) -> FieldGroup:
    """Return the rule for the fields of rotary positions.

    base: the default base of the frequencies (rope_theta).
    partial: the default fraction of a head that is rotated; None if the family always rotates whole heads.
    layer_bases: the default bases of layers with full attention and with a sliding window, if the family has both.
    original_context: the default of original_max_position_embeddings, if the family has it as a separate field.
    theta_key, fraction_key, full_theta_key, sliding_theta_key: the names, in older files, of the fields with the base,
    the fraction, and the bases of layers with full attention and with a sliding window.
    """
    full_theta_key, sliding_theta_key = full_theta_key or theta_key, sliding_theta_key or theta_key
    keys = ("rope_parameters", "rope_scaling", theta_key, fraction_key, full_theta_key, sliding_theta_key)
    defaults: dict[str, Any] = dict.fromkeys((*keys, "rope_theta", "partial_rotary_factor"))
    defaults["original_max_position_embeddings"] = original_context
    rope = _RotaryFields(
        stack, base, partial, layer_bases, original_context, fraction_key, full_theta_key, sliding_theta_key
    )
    return FieldGroup(defaults, rope.read, rope.write)


def falcon_rotary() -> FieldGroup:
    """Return the rule that converts Falcon's rotary positions; it changes nothing in a model with ALiBi."""
    rule = rotary()

    def read(fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if get_value(tree, "decoder.*.attention.positions")["kind"] == "rotary":
            rule.read(fields, tree)

    def write(tree: ConfigTree) -> dict[str, Any]:
        return rule.write(tree) if get_value(tree, "decoder.*.attention.positions")["kind"] == "rotary" else {}

    return FieldGroup(rule.defaults, read, write)
