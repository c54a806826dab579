"""Reversible rules between our weight names (`ours`) and those of a Hugging Face or GGUF family (`theirs`).

    Rule("decoder.*.attention_norm", "transformer.h.*.ln_1")                           a module: its weight and its bias
    Rule(qkv_names("decoder.*.attention"), "transformer.h.*.attn.c_attn", CONV1D_QKV)  three of ours are one of theirs
    Rule("decoder.*.feedforward.up", "model.layers.*.experts.#.w3.weight", STACK)      one of ours is many of theirs

`*` is the index of a layer, `#` the index of an expert or a head.  `map_weights` finds the first rule that matches each
weight of a model, and returns pairs of our names and their names, which are used both to load and to save.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config.model import AttentionConfig, ModelConfig
from monoblock.errors import FileError
from monoblock.interop.weights import AttentionShape, TensorMapping, Tensors, TensorTransform


class Rule(NamedTuple):
    """Which of our weights (`ours`) correspond to which weights of a family (`theirs`)."""

    ours: str  # one name, or several separated by spaces
    theirs: str
    transform: TensorTransform | None = None  # None if the tensor is the same


# -- transforms -------------------------------------------------------------------------------------------------------


def _single_tensor(to_ours: Callable[[Tensor], Tensor], to_theirs: Callable[[Tensor], Tensor]) -> TensorTransform:
    return TensorTransform(lambda theirs, _: [to_ours(theirs[0])], lambda ours, _: [to_theirs(ours[0])])


def _split_and_join(
    split: Callable[[Tensor, AttentionShape], Tensors], join: Callable[[Tensors, AttentionShape], Tensor]
) -> TensorTransform:
    return TensorTransform(lambda theirs, shape: split(theirs[0], shape), lambda ours, shape: [join(ours, shape)])


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _split_qkv_rows(tensor: Tensor, shape: AttentionShape) -> Tensors:
    H, G, K, V = shape
    return tensor.split((H * K, G * K, G * V))


def _split_qkv_by_kv_head(tensor: Tensor, shape: AttentionShape) -> Tensors:
    H, G, K, _ = shape
    parts = tensor.unflatten(0, (G, H // G + 2, K)).split((H // G, 1, 1), dim=1)
    return [part.flatten(0, 2) for part in parts]


def _join_qkv_by_kv_head(ours: Tensors, shape: AttentionShape) -> Tensor:
    H, G, K, _ = shape
    shapes = ((G, H // G, K), (G, 1, K), (G, 1, K))
    return torch.cat([part.unflatten(0, axes) for part, axes in zip(ours, shapes, strict=True)], 1).flatten(0, 2)


CODEGEN_SHARDS = 4


def _split_codegen_qkv(tensor: Tensor, _: AttentionShape) -> Tensors:
    query, value, key = (part.flatten(0, 1) for part in tensor.unflatten(0, (CODEGEN_SHARDS, 3, -1)).unbind(1))
    return [query, key, value]


def _join_codegen_qkv(ours: Tensors, _: AttentionShape) -> Tensor:
    query, key, value = (part.unflatten(0, (CODEGEN_SHARDS, -1)) for part in ours)
    return torch.stack((query, value, key), 1).flatten(0, 2)


def _squeeze_leading(axes: int) -> TensorTransform:
    return _single_tensor(lambda t: t.flatten(0, axes), lambda t: t[(None,) * axes])


CONV1D = _single_tensor(_transpose, _transpose)  # their Conv1D multiplies from the right: (in, out)
QKV_ROWS = _split_and_join(_split_qkv_rows, lambda ours, _: torch.cat(list(ours)))  # [q | k | v]
CONV1D_QKV = _split_and_join(
    lambda t, h: [_transpose(p) for p in t.chunk(3, -1)], lambda o, _: torch.cat([_transpose(p) for p in o], -1)
)
QKV_BY_KV_HEAD = _split_and_join(_split_qkv_by_kv_head, _join_qkv_by_kv_head)  # for each key/value head: queries, k, v
CODEGEN_QKV = _split_and_join(_split_codegen_qkv, _join_codegen_qkv)  # for each shard: q, v, k
GATE_UP_ROWS = _split_and_join(lambda t, _: t.chunk(2), lambda o, _: torch.cat(list(o)))  # [gate | up]
SQUEEZE_1, SQUEEZE_2 = _squeeze_leading(1), _squeeze_leading(2)  # leading axes of size one, for broadcasting
TRANSPOSE_EXPERTS = _single_tensor(lambda t: t.mT, lambda t: t.mT)  # experts stored (E, in, out)
GATE_UP_INTERLEAVED = _split_and_join(  # gate and up alternate along the last axis: (E, in, 2 out) or (E, 2 out)
    lambda t, _: [p.mT if t.dim() == 3 else p for p in (t[..., 0::2], t[..., 1::2])],
    lambda o, _: torch.stack([p.mT if p.dim() == 3 else p for p in o], -1).flatten(-2),
)
STACK = TensorTransform(lambda theirs, _: [torch.stack(list(theirs))], lambda ours, _: list(ours[0].unbind()))


def qkv_names(attention: str) -> str:
    return " ".join(f"{attention}.{name}" for name in ("query", "key", "value"))


# -- matching ---------------------------------------------------------------------------------------------------------

SUFFIXES = ("", ".weight", ".bias")


@cache
def _compile_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)"))


def _match_rule(rule: Rule, name: str) -> tuple[tuple[str, ...], str, str] | None:
    """Match a rule with one of our weight names.

    Return all our names that the rule joins in one tensor, their name, and the layer index; None if it does not match.
    """
    is_parameter = rule.theirs.endswith((".weight", ".bias"))
    for pattern in rule.ours.split():
        for suffix in SUFFIXES[:1] if is_parameter else SUFFIXES:
            match = _compile_pattern(pattern).fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if match:
                layer = match[1] if match.re.groups else ""
                group = tuple(ours.replace("*", layer) + suffix for ours in rule.ours.split())
                return group, rule.theirs.replace("*", layer) + suffix, layer
    return None


def map_weights(
    rules: Iterable[Rule], shapes: Mapping[str, Sequence[int]], config: ModelConfig
) -> Iterator[TensorMapping]:
    """Yield the mappings between the weights of a model and those of a family; each weight is in exactly one mapping.

    `shapes` are the shapes of the model's weights by name.
    """
    rules, mapped = tuple(rules), set[str]()
    for name, shape in shapes.items():
        if name in mapped:
            continue
        matches = ((rule.transform, match) for rule in rules if (match := _match_rule(rule, name)))
        transform, match = next(matches, (None, None))
        if match is None:
            raise FileError(f"this family has no rule for the name of the weight {name}")
        group, theirs, layer = match
        missing = next((ours for ours in group if ours not in shapes or ours in mapped), None)
        if missing is not None:
            raise FileError(f"this family stores {name} together with {missing}, which the model does not have")
        mapped.update(group)
        names = [theirs.replace("#", str(n)) for n in range(shape[0])] if "#" in theirs else [theirs]
        yield TensorMapping(group, tuple(names), transform, _attention_shape(name, layer, config))


def _attention_shape(name: str, layer: str, config: ModelConfig) -> AttentionShape:
    stack, *rest = name.split(".")
    if not layer or stack not in config.stacks:
        return AttentionShape()
    block = list(config.stacks[stack].layers())[int(layer)]
    attention: AttentionConfig | None = block.cross if rest[1:2] == ["cross"] else block.attention
    assert attention is not None
    return AttentionShape(
        attention.heads, attention.num_kv_heads, attention.key_size(block.width), attention.value_size(block.width)
    )
