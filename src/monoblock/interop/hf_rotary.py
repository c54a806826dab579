"""Rotary angles in the words of published configurations: `rope_parameters`, and what older files say instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monoblock.errors import ConfigError
from monoblock.interop.hf_config import Several, Tree, get
from monoblock.interop.hf_words import FULL, SLIDING
from monoblock.untrusted import shown

IN_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
           "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor",
           "short_factor", "long_factor", "mscale", "mscale_all_dim", "finetuned"}  # fmt: skip
PLAIN = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor")


def _scaling(rope: Mapping[str, Any], context: int, original: int | None) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "yarn", "longrope", "llama3"):
        raise ConfigError(f"the rotary scaling {shown(kind)} is not known")
    found: dict[str, Any] = {"kind": kind} | {name: rope[name] for name in PLAIN if rope.get(name) is not None}
    if kind == "dynamic":
        found["original_context"] = context
    elif kind != "linear":
        found["original_context"] = original or rope.get("original_max_position_embeddings") or context
    if kind in ("longrope", "yarn"):
        found.setdefault("factor", context / found["original_context"])
    if kind == "longrope":
        found |= {"short_factors": rope["short_factor"], "long_factors": rope["long_factor"]}
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim") and "attention_factor" not in found:
        one, other = (0.1 * rope[name] * math.log(found["factor"]) + 1.0 for name in ("mscale", "mscale_all_dim"))
        found["attention_factor"] = one / other if found["factor"] > 1 else 1.0
    return found


def _from_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    kind = scaling["kind"]
    needed = {
        "linear": PLAIN[:1],
        "dynamic": PLAIN[:1],
        "llama3": PLAIN[:3],
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "longrope": ("factor", "attention_factor"),
    }
    if kind not in needed:
        raise ConfigError(f"the rotary scaling {kind!r} has no name there")
    found = {"rope_type": kind} | {name: scaling[name] for name in needed[kind] if scaling[name] is not None}
    if kind not in ("linear", "dynamic"):
        found["original_max_position_embeddings"] = scaling["original_context"]
    if kind == "longrope":
        found |= {"short_factor": list(scaling["short_factors"]), "long_factor": list(scaling["long_factors"])}
    return found


def _size(layer: Tree) -> int:
    attention = layer["attention"]
    return attention["head_dim"] or layer["width"] // attention["heads"]


@dataclass(frozen=True)
class _Angles:
    """How the files of one family tell its angles."""

    stack: str
    base: float
    partial: float | None
    typed: tuple[float, float] | None
    original: int | None
    fraction: str
    far: str
    near: str

    def read(self, given: Mapping[str, Any], tree: Tree) -> None:
        context = get(tree, "input.context")
        for layer in tree[self.stack]["layers"]:
            attention, size = layer["attention"], _size(layer)
            rope = self._of(given, FULL if attention["window"] is None else SLIDING)
            dim = int(size * rope["partial_rotary_factor"])
            attention["positions"] = {
                "kind": "rotary",
                "base": rope["rope_theta"],
                "dim": None if dim == size else dim,
                "layout": attention["positions"]["layout"],
                "scaling": _scaling(rope, context, given["original_max_position_embeddings"]),
            }

    def _of(self, given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """The parameters of one kind of layer: what a file says, or what the family has."""
        rope = self._said(given, kind)
        strange = set(rope) - IN_ROPE
        if strange:
            raise ConfigError(f"the rotary parameter {shown(min(strange))} is not known here")
        usual = self.base if self.typed is None else self.typed[kind == SLIDING]
        older = given["rope_theta"] if self.typed is None else None
        bases = (given[self.near if kind == SLIDING else self.far], older, usual)
        parts = (given[self.fraction], given["partial_rotary_factor"], self.partial, 1.0)
        fixed = {"rope_theta": next(b for b in bases if b is not None)}
        fixed["partial_rotary_factor"] = next(part for part in parts if part is not None)
        found = fixed | {name: value for name, value in rope.items() if value is not None}
        if self.partial is None and found["partial_rotary_factor"] != 1.0:
            part = shown(found["partial_rotary_factor"])
            raise ConfigError(
                f"partial_rotary_factor={part} is nothing this family's class heeds: it turns whole heads"
            )
        return found

    def _said(self, given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        rope = given["rope_parameters"] or {}
        if FULL in rope or SLIDING in rope:
            return rope.get(kind) or {}
        if given["rope_scaling"] and not (self.typed and kind == SLIDING):
            return given["rope_scaling"]
        return rope

    def write(self, tree: Tree) -> dict[str, Any]:
        layers = [layer for layer in tree[self.stack]["layers"] if layer["attention"]["positions"] is not None]
        if not layers:
            raise ConfigError("its positions are not rotary")
        kinds = {FULL if layer["attention"]["window"] is None else SLIDING: _parameters(layer) for layer in layers}
        if self.typed is not None:
            usual = ({"rope_type": "default", "rope_theta": b} for b in self.typed)
            return {"rope_parameters": dict(zip((FULL, SLIDING), usual, strict=True)) | kinds}
        rope = kinds.get(FULL) or kinds[SLIDING]
        whole_head = {} if self.partial in (None, 1.0) else {"partial_rotary_factor": 1.0}
        trained = rope.get("original_max_position_embeddings", self.original)
        beside = {} if self.original is None else {"original_max_position_embeddings": trained}
        return {"rope_parameters": whole_head | rope} | beside


def _parameters(layer: Tree) -> dict[str, Any]:
    """What a file says of one layer."""
    positions, size = layer["attention"]["positions"], _size(layer)
    if positions is None or positions["kind"] != "rotary":
        raise ConfigError("its positions are not rotary")
    part = (positions["dim"] or size) / size
    part = part if int(size * part) == positions["dim"] else math.nextafter(part, 2)
    rope = {"rope_theta": positions["base"], **_from_scaling(positions["scaling"])}
    return rope if positions["dim"] == size else rope | {"partial_rotary_factor": part}


def rotary(
    stack: str = "decoder",
    base: float = 10_000.0,
    partial: float | None = None,
    *,
    typed: tuple[float, float] | None = None,
    original: int | None = None,
    theta: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    far: str | None = None,
    near: str | None = None,
) -> Several:
    """The angles: `rope_parameters`, or rope_theta, rope_scaling and a fraction in the words of older files.

    `partial`: the part of a head that is turned unless a file says another, None where the class turns whole heads
    whatever a file says.  `typed`: the bases of far and near layers of a family that has one set of parameters for
    each; `far` and `near` are what older files call these bases.  `original`: the family keeps the context it was
    trained on beside the angles.
    """
    far, near = far or theta, near or theta
    names = dict.fromkeys(("rope_parameters", "rope_scaling", theta, fraction, far, near))
    names |= dict.fromkeys(("rope_theta", "partial_rotary_factor"))
    names["original_max_position_embeddings"] = original
    angles = _Angles(stack, base, partial, typed, original, fraction, far, near)
    return Several(names, angles.read, angles.write)
