"""Reversible rules between our names of weights and a published family's: one table, read in both directions.

    Rule("decoder.*.attention_norm", "transformer.h.*.ln_1")                      a module: its weight and its bias
    Rule(fused("decoder.*.attention"), "transformer.h.*.attn.c_attn", CONV_ROWS)  three of ours in one of theirs
    Rule("decoder.*.feedforward.up", "model.layers.*.experts.#.w3.weight", STACKED)   one of ours from many of theirs

`*` is the number of a layer, `#` counts experts or heads.  `plan` pairs the weights of a built model with names of
theirs by the first rule that fits; `load` and `save` walk the same plan, so what one direction can do the other can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config import AttentionConfig, ModelConfig
from monoblock.errors import FileError

Tensors = Sequence[Tensor]


class Heads(NamedTuple):
    """What a step must know of the attention it takes apart: heads, key/value heads, sizes of a key and a value."""

    heads: int = 1
    groups: int = 1
    key: int = 1
    value: int = 1


class Step(NamedTuple):
    """How tensors of theirs become ours, and back."""

    split: Callable[[Tensors, Heads], Tensors]
    join: Callable[[Tensors, Heads], Tensors]


class Rule(NamedTuple):
    ours: str  # several names are separated by blanks
    theirs: str
    step: Step | None = None  # None: the same tensor


class Move(NamedTuple):
    """One application of a rule: these weights of ours are those of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    step: Step | None
    heads: Heads

    def load(self, tensors: Tensors) -> Tensors:
        return tensors if self.step is None else self.step.split(tensors, self.heads)

    def save(self, tensors: Tensors) -> Tensors:
        return tensors if self.step is None else self.step.join(tensors, self.heads)


# -- steps ------------------------------------------------------------------------------------------------------------


def _one(change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Step:
    return Step(lambda found, _: [change(found[0])], lambda ours, _: [back(ours[0])])


def _by(split: Callable[[Tensor, Heads], Tensors], join: Callable[[Tensors, Heads], Tensor]) -> Step:
    return Step(lambda found, heads: split(found[0], heads), lambda ours, heads: [join(ours, heads)])


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _rows(tensor: Tensor, h: Heads) -> Tensors:
    return tensor.split((h.heads * h.key, h.groups * h.key, h.groups * h.value))


def _grouped(tensor: Tensor, h: Heads) -> Tensors:
    each = h.heads // h.groups
    parts = tensor.unflatten(0, (h.groups, each + 2, h.key)).split((each, 1, 1), dim=1)
    return [part.flatten(0, 2) for part in parts]


def _ungrouped(ours: Tensors, h: Heads) -> Tensor:
    each = h.heads // h.groups
    shapes = ((h.groups, each, h.key), (h.groups, 1, h.key), (h.groups, 1, h.key))
    return torch.cat([part.unflatten(0, shape) for part, shape in zip(ours, shapes, strict=True)], 1).flatten(0, 2)


SHARDS = 4


def _sharded(tensor: Tensor, h: Heads) -> Tensors:
    query, value, key = (part.flatten(0, 1) for part in tensor.unflatten(0, (SHARDS, 3, -1)).unbind(1))
    return [query, key, value]


def _unsharded(ours: Tensors, h: Heads) -> Tensor:
    query, key, value = (part.unflatten(0, (SHARDS, -1)) for part in ours)
    return torch.stack((query, value, key), 1).flatten(0, 2)


def _flat(axes: int) -> Step:
    return _one(lambda t: t.flatten(0, axes), lambda t: t[(None,) * axes])


CONV = _one(_turned, _turned)  # their Conv1D multiplies from the right: (in, out)
ROWS = _by(_rows, lambda ours, _: torch.cat(list(ours)))  # [q | k | v]
CONV_ROWS = _by(lambda t, h: [_turned(p) for p in t.chunk(3, -1)], lambda o, _: torch.cat([_turned(p) for p in o], -1))
GROUPED = _by(_grouped, _ungrouped)  # queries of a key head, its key, its value; then of the next
SHARDED = _by(_sharded, _unsharded)  # CodeGen: four shards, in each q, v, k
HALVES = _by(lambda t, _: t.chunk(2), lambda o, _: torch.cat(list(o)))  # [gate | up]
FLAT1, FLAT2 = _flat(1), _flat(2)  # leading axes of size one, there for broadcasting
TURNED_EACH = _one(lambda t: t.mT, lambda t: t.mT)  # experts stored (E, in, out)
WOVEN = _by(  # gate and up in turn along the last axis, (E, in, 2 out) or (E, 2 out)
    lambda t, _: [p.mT if t.dim() == 3 else p for p in (t[..., 0::2], t[..., 1::2])],
    lambda o, _: torch.stack([p.mT if p.dim() == 3 else p for p in o], -1).flatten(-2),
)
STACKED = Step(lambda found, _: [torch.stack(list(found))], lambda ours, _: list(ours[0].unbind()))


def fused(attention: str) -> str:
    return " ".join(f"{attention}.{name}" for name in ("query", "key", "value"))


# -- the plan ---------------------------------------------------------------------------------------------------------

PARTS = ("", ".weight", ".bias")


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)"))


def _fit(rule: Rule, name: str) -> tuple[tuple[str, ...], str, str] | None:
    """All our names of the group this one is in, theirs, and the layer's number; None where the rule is of others."""
    whole = rule.theirs.endswith((".weight", ".bias"))
    for one in rule.ours.split():
        for part in PARTS[:1] if whole else PARTS:
            found = _pattern(one).fullmatch(name.removesuffix(part)) if name.endswith(part) else None
            if found:
                layer = found[1] if found.re.groups else ""
                group = tuple(each.replace("*", layer) + part for each in rule.ours.split())
                return group, rule.theirs.replace("*", layer) + part, layer
    return None


def plan(table: Iterable[Rule], ours: Mapping[str, Sequence[int]], config: ModelConfig) -> Iterator[Move]:
    """What must move, by rules; `ours` are the names and shapes of a built model, each is moved exactly once."""
    rules, done = tuple(table), set[str]()
    for name, shape in ours.items():
        if name in done:
            continue
        fitting = ((rule.step, found) for rule in rules if (found := _fit(rule, name)))
        step, found = next(fitting, (None, None))
        if found is None:
            raise FileError(f"no rule of this family says what {name} is called there")
        group, theirs, layer = found
        strange = next((each for each in group if each not in ours or each in done), None)
        if strange is not None:
            raise FileError(f"{name} belongs with {strange}, which this model has no place for")
        done.update(group)
        names = [theirs.replace("#", str(n)) for n in range(shape[0])] if "#" in theirs else [theirs]
        yield Move(group, tuple(names), step, _heads(name, layer, config))


def _heads(name: str, layer: str, config: ModelConfig) -> Heads:
    stack, *rest = name.split(".")
    if not layer or stack not in config.stacks:
        return Heads()
    block = list(config.stacks[stack].layers())[int(layer)]
    attention: AttentionConfig | None = block.cross if rest[1:2] == ["cross"] else block.attention
    assert attention is not None
    return Heads(attention.heads, attention.groups, attention.key_size(block.width), attention.value_size(block.width))
