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

    def read(number: float) -> float:
        if not number > 0:
            raise ConfigError(f"{theirs}={shown(number)} has no root to divide by; it is above zero")
        return number**-0.5

    return Field(theirs, ours, default, read, lambda scale: whole(scale**-2))


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
        found: dict[str, Any] = {"layer_types": [FULL if w is None else SLIDING for w in windows]}
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
