"""Words of published configurations that need more than a rename: activations, rotary angles, layer types, labels.

Each gives a row of hf_config.py, so that a table of fields stays a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monoblock.errors import ConfigError
from monoblock.interop.hf_config import Field, Several, Tree, get, put
from monoblock.untrusted import shown

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


def to_activation(word: Any) -> str:
    if not isinstance(word, str) or word not in ACTIVATIONS:
        raise ConfigError(f"the activation {shown(word)} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[word]


def from_activation(ours: str, usual: str) -> str:
    """Their word for an activation: the family's usual one where that means the same."""
    if ACTIVATIONS.get(usual) == ours:
        return usual
    return next(word for word, meant in ACTIVATIONS.items() if meant == ours)


def activation(theirs: str, ours: str, default: str) -> Field:
    return Field(theirs, ours, default, to_activation, lambda word: from_activation(word, default))


def flag(theirs: str, ours: str, default: bool, yes: Any, no: Any) -> Field:
    """A switch of theirs that chooses between two of our words; letters of biases in any order are one word."""

    def write(value: Any) -> bool:
        return sorted(value) == sorted(yes) if isinstance(value, str) and isinstance(yes, str) else value == yes

    return Field(theirs, ours, default, lambda given: yes if given else no, write)


def inverse_root(theirs: str, ours: str, default: float) -> Field:
    """A number of theirs whose root divides the scores."""
    return Field(theirs, ours, default, lambda n: n**-0.5, lambda scale: whole(scale**-2))


def inverse(theirs: str, ours: str, default: float) -> Field:
    return Field(theirs, ours, default, lambda n: 1.0 / n, lambda scale: whole(1.0 / scale))


def whole(number: float) -> float | int:
    """The whole number this is but for rounding, else the number."""
    return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else number


def hidden(theirs: str, ours: str, width: str, default: Any = None) -> Several:
    """The size inside the feed-forward; where nothing is said, four times the width."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, ours, given[theirs] if given[theirs] is not None else 4 * get(tree, width))

    return Several({theirs: default}, read, lambda tree: {theirs: get(tree, ours)})


def always_four_times(ours: str, width: str, **also: int) -> Several:
    """A family whose feed-forward is four times the width, and that says so nowhere, or by a ratio."""
    ((name, ratio),) = also.items() or [("", 4)]
    names = {name: ratio} if name else {}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, ours, int(get(tree, width) * given.get(name, ratio)))

    def write(tree: Tree) -> dict[str, Any]:
        return {name: whole(get(tree, ours) / get(tree, width))} if name else {}

    return Several(names, read, write)


def unheeded(theirs: str, default: Any) -> Several:
    """A field the published class has and does not look at."""
    return Several({theirs: default}, lambda given, tree: None, lambda tree: {})


def labels() -> Several:
    """How many classes a classifier tells apart: as many as it has names for."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        head = tree["head"]
        if head is not None and head["kind"] in ("classifier", "tagger") and head["classes"] != 1:
            names = given["id2label"]
            head["classes"] = given["num_labels"] or (len(names) if isinstance(names, dict) else 2)

    def write(tree: Tree) -> dict[str, Any]:
        head = tree["head"]
        if head is None or head["kind"] not in ("classifier", "tagger") or head["classes"] == 1:
            return {}
        names = [f"LABEL_{n}" for n in range(head["classes"])]
        return {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}

    return Several({"id2label": None, "num_labels": None, "label2id": None}, read, write)


def offset_positions(context: str, offset: str, default: int) -> Several:
    """RoBERTa's count of places: it starts after the id of padding, and the table has rows for that too."""
    names = {"max_position_embeddings": default, "pad_token_id": 1}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        first = given["pad_token_id"] + 1
        put(tree, offset, first)
        put(tree, context, given["max_position_embeddings"] - first)

    def write(tree: Tree) -> dict[str, Any]:
        first = get(tree, offset)
        return {"max_position_embeddings": get(tree, context) + first, "pad_token_id": first - 1}

    return Several(names, read, write)


# -- layers that differ -----------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
Types = Callable[[Mapping[str, Any], int], Sequence[str]]


def every(interval: int, which: str, others: str, *, first: bool = False) -> Types:
    """Every so many-th layer is of one type, counted from the first or so that the last of a round is."""
    return lambda given, depth: [which if (n + (0 if first else 1)) % interval == 0 else others for n in range(depth)]


def after_window_layers(given: Mapping[str, Any], depth: int) -> Sequence[str]:
    """Qwen: the window is for the layers from max_window_layers on."""
    on = given["use_sliding_window"] and given["sliding_window"] is not None
    return [SLIDING if on and n >= given["max_window_layers"] else FULL for n in range(depth)]


def layer_types(
    stack: str,
    usual: Types,
    *,
    window: str = "sliding_window",
    default: int | None = None,
    to_ours: Callable[[int], int] = lambda w: w,
    to_theirs: Callable[[int], int] = lambda w: w,
    switch: bool = False,
    **also: Any,
) -> Several:
    """Which layers look near, and how far: `layer_types` beside a window, or what a family takes where it is silent."""
    more = {"use_sliding_window": False} if switch else {}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        layers = tree[stack]["layers"]
        types = given["layer_types"] if given["layer_types"] is not None else usual(given, len(layers))
        if len(types) != len(layers) or set(types) - {FULL, SLIDING}:
            raise ConfigError(f"layer_types={shown(types)} must name {FULL} or {SLIDING} for each of {len(layers)}")
        near = given[window] if given.get("use_sliding_window", True) else None
        for layer, kind in zip(layers, types, strict=True):
            layer["attention"]["window"] = to_ours(near) if kind == SLIDING and near is not None else None

    def write(tree: Tree) -> dict[str, Any]:
        windows = [layer["attention"]["window"] for layer in tree[stack]["layers"]]
        near = next((w for w in windows if w is not None), None)
        found = {"layer_types": [FULL if w is None else SLIDING for w in windows]}
        found[window] = default if near is None else to_theirs(near)
        return found | ({"use_sliding_window": near is not None} if switch else {})

    return Several({window: default, "layer_types": None, **more, **also}, read, write)


def switched_window(ours: str, default: int) -> Several:
    """One window for all layers, and a switch beside it."""

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, ours, given["sliding_window"] if given["use_sliding_window"] else None)

    def write(tree: Tree) -> dict[str, Any]:
        near = get(tree, ours)
        return {"use_sliding_window": near is not None, "sliding_window": near}

    return Several({"use_sliding_window": False, "sliding_window": default, "max_window_layers": 28}, read, write)


# -- rotary -----------------------------------------------------------------------------------------------------------

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
    found = {"kind": kind} | {name: rope[name] for name in PLAIN if rope.get(name) is not None}
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


def rotary(
    stack: str = "decoder",
    base: float = 10_000.0,
    partial: float = 1.0,
    *,
    typed: tuple[float, float] | None = None,
    original: int | None = None,
    theta: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    far: str | None = None,
    near: str | None = None,
) -> Several:
    """The angles: `rope_parameters`, or rope_theta, rope_scaling and a fraction in the words of older files.

    `typed`: the bases of far and near layers of a family that has one set of parameters for each; `far` and `near` are
    what older files call these bases.  `original`: the family keeps the context it was trained on beside the angles.
    """
    far, near = far or theta, near or theta
    names = dict.fromkeys(("rope_parameters", "rope_scaling", theta, fraction, far, near))
    names |= dict.fromkeys(("rope_theta", "partial_rotary_factor"))
    names["original_max_position_embeddings"] = original

    def one(given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        rope = given["rope_parameters"] or {}
        if FULL in rope or SLIDING in rope:
            rope = rope.get(kind) or {}
        elif given["rope_scaling"] and not (typed and kind == SLIDING):
            rope = given["rope_scaling"]
        strange = set(rope) - IN_ROPE
        if strange:
            raise ConfigError(f"the rotary parameter {shown(min(strange))} is not known here")
        usual = base if typed is None else typed[kind == SLIDING]
        bases = (given[near if kind == SLIDING else far], given["rope_theta"] if typed is None else None, usual)
        parts = (given[fraction], given["partial_rotary_factor"], partial)
        fixed = {"rope_theta": next(b for b in bases if b is not None)}
        fixed["partial_rotary_factor"] = next(part for part in parts if part is not None)
        return fixed | {name: value for name, value in rope.items() if value is not None}

    def read(given: Mapping[str, Any], tree: Tree) -> None:
        context = get(tree, "input.context")
        for layer in tree[stack]["layers"]:
            attention, size = layer["attention"], _size(layer)
            rope = one(given, FULL if attention["window"] is None else SLIDING)
            dim = int(size * rope["partial_rotary_factor"])
            attention["positions"] = {
                "kind": "rotary",
                "base": rope["rope_theta"],
                "dim": None if dim == size else dim,
                "layout": attention["positions"]["layout"],
                "scaling": _scaling(rope, context, given["original_max_position_embeddings"]),
            }

    def said(layer: Tree) -> dict[str, Any]:
        positions, size = layer["attention"]["positions"], _size(layer)
        if positions is None or positions["kind"] != "rotary":
            raise ConfigError("its positions are not rotary")
        part = (positions["dim"] or size) / size
        part = part if int(size * part) == positions["dim"] else math.nextafter(part, 2)
        rope = {"rope_theta": positions["base"], **_from_scaling(positions["scaling"])}
        return rope if positions["dim"] == size else rope | {"partial_rotary_factor": part}

    def write(tree: Tree) -> dict[str, Any]:
        layers = [layer for layer in tree[stack]["layers"] if layer["attention"]["positions"] is not None]
        if not layers:
            raise ConfigError("its positions are not rotary")
        kinds = {FULL if layer["attention"]["window"] is None else SLIDING: said(layer) for layer in layers}
        if typed is not None:
            usual = dict(zip((FULL, SLIDING), ({"rope_type": "default", "rope_theta": b} for b in typed), strict=True))
            return {"rope_parameters": usual | kinds}
        rope = kinds.get(FULL) or kinds[SLIDING]
        whole_head = {} if partial == 1.0 else {"partial_rotary_factor": 1.0}
        trained = rope.get("original_max_position_embeddings", original)
        beside = {} if original is None else {"original_max_position_embeddings": trained}
        return {"rope_parameters": whole_head | rope} | beside

    return Several(names, read, write)
