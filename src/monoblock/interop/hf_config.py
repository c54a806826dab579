"""Configurations of a published family to ours and back, by rows: a field of theirs, a place in ours, a word for both.

    Field("n_embd", "decoder.*.width", 768)          `*` is every layer, `**.eps` every eps there is
    Const("decoder.*.attention.bias", "qkv")         what the family always is, and no field of theirs says
    Fixed("qk_ln", False)                            a field of theirs that may only be this
    Several({…}, read, write)                        fields that mean something only together

A structure (a preset) is unrolled into nested dicts with a list of layers; reading writes the rows into it, writing
reads them out.  What a configuration of theirs says beyond its rows is refused by name, unless it is known to change
nothing.  Whether ours can be said in theirs at all is found out by reading back what was written.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monoblock.config import BlockConfig, ModelConfig
from monoblock.errors import ConfigError, FileError, MonoblockError
from monoblock.interop.hf_harmless import HARMLESS, NEUTRAL
from monoblock.knobs import Values, rebuild
from monoblock.parts import AttentionConfig, EmbeddingConfig, InitConfig
from monoblock.schema import to_dict
from monoblock.schemes import Learned, Rotary
from monoblock.untrusted import shown

Tree = dict[str, Any]
MISSING: Any = object()
STACKS = ("encoder", "decoder")


# -- a model as a tree of dicts with a list of layers -----------------------------------------------------------------


def unroll(config: ModelConfig) -> Tree:
    """Nested dicts; a stack is its layers one by one, and whether they are one block run again and again."""
    tree = to_dict(config)
    for name, stack in config.stacks.items():
        written = {id(block): to_dict(block) for run in stack.pattern for block in run.blocks}
        layers = [copy.deepcopy(written[id(block)]) for block in stack.layers()]
        tree[name] = {"layers": layers, "tied": any(run.tied for run in stack.pattern), "norm": tree[name]["norm"]}
    tree["share"] = config.tie in ("source_target", "three_way")  # one table for source and target
    return tree


def roll(tree: Tree) -> ModelConfig:
    """The configuration a tree says, its layers as the shortest pattern."""
    tree = {name: copy.deepcopy(value) for name, value in tree.items() if name != "share"}
    for name in STACKS:
        stack = tree.get(name)
        if stack is not None:
            layers = stack["layers"]
            runs = [(layers[:1], len(layers))] if stack["tied"] else _pattern(layers)
            pattern = [{"blocks": run, "times": times, "tied": stack["tied"]} for run, times in runs]
            tree[name] = {"pattern": pattern, "norm": stack["norm"]}
    return ModelConfig.from_dict(tree)


def _pattern(blocks: Sequence[Tree]) -> list[tuple[Sequence[Tree], int]]:
    """A few first blocks, a run repeated, a rest: the shortest way to say a list of blocks."""
    said = [json.dumps(block, sort_keys=True, default=list) for block in blocks]
    kinds = {text: number for number, text in enumerate(dict.fromkeys(said))}
    word = [kinds[text] for text in said]
    count, best = len(word), (len(word) + 1, 0, len(word))
    for first in range(min(count, 5)):
        period = next((p for p in range(1, count - first) if word[first + p :] == word[first:-p]), count - first)
        best = min(best, (first + period + (count - first) % period, first, period))
    _, first, period = best
    times = (count - first) // period
    rest = blocks[first + times * period :]
    runs = [(blocks[:first], 1), (blocks[first : first + period], times), (rest, 1)]
    return [(run, times) for run, times in runs if run]


def _places(node: Any, path: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Every (container, key) a path leads to; where something on the way is not there, nothing."""
    step, rest = path[0], path[1:]
    if node is None:
        return
    if step == "**":
        yield from _everywhere(node, rest[0])
    elif step == "*":
        for layer in node["layers"]:
            yield from _places(layer, rest)
    elif not rest:
        yield node, step
    elif isinstance(node, dict):
        yield from _places(node.get(step), rest)


def _everywhere(node: Any, key: str) -> Iterator[tuple[Any, str]]:
    if isinstance(node, dict):
        if key in node:
            yield node, key
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _everywhere(one, key)


def _own(value: Any) -> Any:
    """A copy, where several places would else share one dict."""
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def put(tree: Tree, paths: str, value: Any) -> None:
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            layers = tree[stack]["layers"]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2_000:
                raise ConfigError(f"{shown(value)} is no number of layers; it is a whole number from 1 on")
            tree[stack]["layers"] = [copy.deepcopy(layers[0]) for _ in range(value)]
            continue
        for node, key in _places(tree, path.split(".")):
            node[key] = _own(value)


def get(tree: Tree, paths: str) -> Any:
    """What stands at the first of these places."""
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            return len(tree[stack]["layers"])
        for node, key in _places(tree, path.split(".")):
            return node.get(key)
    return MISSING


# -- rows -------------------------------------------------------------------------------------------------------------


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    theirs: str
    ours: str  # places separated by blanks; the first is the one read
    default: Any = MISSING  # what the published class takes where a file says nothing
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same

    @property
    def names(self) -> dict[str, Any]:
        return {self.theirs: self.default}

    def take(self, given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, self.ours, self.read(given[self.theirs]))

    def give(self, tree: Tree) -> dict[str, Any]:
        found = get(tree, self.ours)
        return {self.theirs: self.default if found is MISSING else self.write(found)}


@dataclass(frozen=True)
class Const:
    ours: str
    value: Any

    @property
    def names(self) -> dict[str, Any]:
        return {}

    def take(self, given: Mapping[str, Any], tree: Tree) -> None:
        put(tree, self.ours, self.value)

    def give(self, tree: Tree) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Fixed:
    theirs: str
    value: Any
    others: tuple[Any, ...] = ()  # that mean the same

    @property
    def names(self) -> dict[str, Any]:
        return {self.theirs: self.value}

    def take(self, given: Mapping[str, Any], tree: Tree) -> None:
        if given[self.theirs] not in (self.value, *self.others):
            found = shown(given[self.theirs])
            raise ConfigError(f"{self.theirs}={found} changes the computation in a way this block does not know")

    def give(self, tree: Tree) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Several:
    names: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], Tree], None]
    write: Callable[[Tree], dict[str, Any]]

    def take(self, given: Mapping[str, Any], tree: Tree) -> None:
        self.read(given, tree)

    def give(self, tree: Tree) -> dict[str, Any]:
        return self.write(tree)


Row = Field | Const | Fixed | Several


def check_fields(rows: Sequence[Row], given: Mapping[str, Any], harmless: frozenset[str] = HARMLESS) -> dict[str, Any]:
    """What is given with the defaults filled in; a field nobody knows is refused by name."""
    known = {name: default for row in rows for name, default in row.names.items()}
    for name, value in given.items():
        if name not in known and name not in harmless and value not in NEUTRAL.get(name, ()):
            raise FileError(
                f"its field {shown(name)} ({shown(value)}) is not known here and may change what the model computes; "
                f"remove it if it does not"
            )
    for name, default in known.items():
        if default is MISSING and name not in given:
            raise FileError(f"it lacks the field {name!r}")
    return known | {name: value for name, value in given.items() if name in known}


def read_rows(rows: Sequence[Row], given: Mapping[str, Any], start: ModelConfig, head: Tree | None) -> Tree:
    """Our tree for a configuration of theirs, from a structure to start from and the head its class has."""
    tree = unroll(start)
    tree["head"], tree["tie"], tree["init"] = copy.deepcopy(head), "none", to_dict(InitConfig())
    for row in rows:
        try:
            row.take(given, tree)
        except MonoblockError:
            raise
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as problem:
            names = ", ".join(f"{name}={shown(given[name])}" for name in row.names)
            raise ConfigError(f"{names} cannot be: {' '.join(str(problem).split())[:80]}") from None
    return tree


def write_rows(rows: Sequence[Row], config: ModelConfig) -> dict[str, Any]:
    tree, found = unroll(config), dict[str, Any]()
    for row in rows:
        found.update(row.give(tree))
    return found


# -- whether two configurations compute the same ----------------------------------------------------------------------


def _plain(part: Any, values: Values) -> None:
    """What matters in training only left out."""
    for name in ("dropout", "word_dropout"):
        if name in values:
            values[name] = 0.0
    if isinstance(part, BlockConfig):
        values["layer_scale"] = None if part.layer_scale is None else 1.0  # where it starts
    if isinstance(part, ModelConfig):
        values["init"] = InitConfig()
    if isinstance(part, EmbeddingConfig):
        if not isinstance(part.positions, Learned):
            values["context"] = None
        if part.dim is None:
            values["projection"], values["projection_bias"] = "last", True


def _sized(attention: AttentionConfig | None, width: int) -> AttentionConfig | None:
    if attention is None:
        return None
    size = attention.key_size(width)

    def edit(part: Any, values: Values) -> None:
        if isinstance(part, AttentionConfig):
            values.update(kv_heads=part.groups, head_dim=size, value_dim=part.value_size(width))
            values["scale"] = size**-0.5 if part.scale is None else part.scale
            values["bias"] = "".join(sorted(part.bias))
            values["random_seed"] = part.random_seed if part.random_blocks else 0
        if isinstance(part, Rotary):
            values["dim"] = size if part.dim is None else part.dim

    return rebuild(attention, edit)


def sized(config: ModelConfig) -> ModelConfig:
    """The same with every size that follows from others written out."""

    def edit(part: Any, values: Values) -> None:
        if isinstance(part, BlockConfig):
            values.update({name: _sized(values[name], part.width) for name in ("attention", "cross")})

    return rebuild(config, edit)


def difference(one: ModelConfig, other: ModelConfig) -> str | None:
    """The first place where two configurations do not compute the same, or None."""
    first, second = (unroll(rebuild(sized(config), _plain)) for config in (one, other))
    return _apart(first, second, "")


def _apart(one: Any, other: Any, place: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other])]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(n), *both) for n, both in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, float) and isinstance(other, (int, float)) and math.isclose(one, other, rel_tol=1e-12):
        return None
    else:
        return None if one == other else f"{place}={shown(one)}"
    found = (_apart(a, b, f"{place}.{key}" if place else key) for key, a, b in pairs)
    return next((where for where in found if where), None)
