"""Configurations as trees: nested dicts with a list of layers, whose values are read and set by paths.

tree = config_to_tree(config)
get_value(tree, "decoder.*.attention.heads")                `*` is every layer, `**.eps` every field named eps
set_value(tree, "decoder.*.width encoder.*.width", 96)      several paths are separated by spaces

`config_difference` compares two configurations by what they compute.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from monoblock.config.knobs import FieldValues, rebuild
from monoblock.config.model import AttentionConfig, BlockConfig, EmbeddingConfig, InitConfig, ModelConfig
from monoblock.config.positions import Learned, Rotary
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError
from monoblock.untrusted_files import short_repr

ConfigTree = dict[str, Any]
MISSING: Any = object()
STACKS = ("encoder", "decoder")
MAX_LAYERS = 2_000


def config_to_tree(config: ModelConfig) -> ConfigTree:
    """Convert a configuration to a tree: nested dicts, in which each stack has a list of its layers."""
    tree = to_dict(config)
    for name, stack in config.stacks.items():
        blocks = {id(block): to_dict(block) for repeat in stack.pattern for block in repeat.blocks}
        layers = [copy.deepcopy(blocks[id(block)]) for block in stack.layers()]
        tied = any(repeat.tied for repeat in stack.pattern)  # all layers share one set of weights
        tree[name] = {"layers": layers, "tied": tied, "norm": tree[name]["norm"]}
    tree["share"] = config.tie in ("source_target", "three_way")  # one embedding for source and target
    return tree


def tree_to_config(tree: ConfigTree) -> ModelConfig:
    """Convert a tree back to a configuration, in which the layers of a stack are the shortest repeated pattern."""
    tree = {name: value for name, value in tree.items() if name != "share"}  # its values are not changed
    for name in STACKS:
        stack = tree.get(name)
        if stack is not None:
            layers = stack["layers"]
            repeats = [(layers[:1], len(layers))] if stack["tied"] else _compress_layers(layers)
            pattern = [{"blocks": blocks, "times": times, "tied": stack["tied"]} for blocks, times in repeats]
            tree[name] = {"pattern": pattern, "norm": stack["norm"]}
    return ModelConfig.from_dict(tree)


def _compress_layers(blocks: Sequence[ConfigTree]) -> list[tuple[Sequence[ConfigTree], int]]:
    """Return the blocks as (blocks, times) pairs, as few blocks as possible.

    There are at most three pairs: some first blocks, a sequence of blocks that is repeated, and the remaining blocks.
    """
    texts = [json.dumps(block, sort_keys=True, default=list) for block in blocks]
    ids = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    sequence = [ids[text] for text in texts]
    count, best = len(sequence), (len(sequence) + 1, 0, len(sequence))
    for first in range(min(count, 5)):
        tail = sequence[first:]
        period = next((p for p in range(1, len(tail)) if tail[p:] == tail[:-p]), len(tail))
        best = min(best, (first + period + len(tail) % period, first, period))
    _, first, period = best
    times = (count - first) // period
    rest = blocks[first + times * period :]
    repeats = [(blocks[:first], 1), (blocks[first : first + period], times), (rest, 1)]
    return [(part, times) for part, times in repeats if part]


def _resolve_path(node: Any, path: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield every (dict, key) that a path selects; nothing if the path does not exist in this tree."""
    key, rest = path[0], path[1:]
    if node is None:
        return
    if key == "**":
        yield from _find_key(node, rest[0])
    elif key == "*":
        for layer in node["layers"]:
            yield from _resolve_path(layer, rest)
    elif not rest:
        yield node, key
    elif isinstance(node, dict):
        yield from _resolve_path(node.get(key), rest)


def _find_key(node: Any, key: str) -> Iterator[tuple[Any, str]]:
    if isinstance(node, dict):
        if key in node:
            yield node, key
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _find_key(child, key)


def set_value(tree: ConfigTree, paths: str, value: Any) -> None:
    """Set a value at each of these paths, which are separated by spaces."""
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            layers = tree[stack]["layers"]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_LAYERS:
                raise ConfigError(
                    f"{short_repr(value)} is not a number of layers; write a whole number from 1 to {MAX_LAYERS}"
                )
            tree[stack]["layers"] = [copy.deepcopy(layers[0]) for _ in range(value)]
            continue
        for node, key in _resolve_path(tree, path.split(".")):
            node[key] = copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def get_value(tree: ConfigTree, paths: str) -> Any:
    """Return the value at the first of these space-separated paths that exists; MISSING if none exists."""
    for path in paths.split():
        stack, _, rest = path.partition(".")
        if rest == "depth":
            return len(tree[stack]["layers"])
        for node, key in _resolve_path(tree, path.split(".")):
            return node.get(key)
    return MISSING


# -- comparing configurations -----------------------------------------------------------------------------------------


def _drop_training_fields(part: Any, values: FieldValues) -> None:
    """Reset the values of a part of a configuration that do not change its output in inference, such as dropout."""
    for name in ("dropout", "word_dropout"):
        if name in values:
            values[name] = 0.0
    if isinstance(part, BlockConfig):
        values["layer_scale"] = None if part.layer_scale is None else 1.0  # its initial value
    if isinstance(part, ModelConfig):
        values["init"] = InitConfig()
    if isinstance(part, EmbeddingConfig):
        if not isinstance(part.positions, Learned):
            values["context"] = None
        if part.dim is None:
            values["projection"], values["projection_bias"] = "last", True


def _resolve_attention_sizes(attention: AttentionConfig | None, width: int) -> AttentionConfig | None:
    if attention is None:
        return None
    size = attention.key_size(width)

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, AttentionConfig):
            values.update(kv_heads=part.num_kv_heads, head_dim=size, value_dim=part.value_size(width))
            values["scale"] = size**-0.5 if part.scale is None else part.scale
            values["bias"] = "".join(sorted(part.bias))
            values["random_seed"] = part.random_seed if part.random_blocks else 0
        if isinstance(part, Rotary):
            values["dim"] = size if part.dim is None else part.dim

    return rebuild(attention, edit)


def resolve_sizes(config: ModelConfig) -> ModelConfig:
    """Fill in values that are None because other values determine them: head sizes, key/value heads, scales."""

    def edit(part: Any, values: FieldValues) -> None:
        if isinstance(part, BlockConfig):
            values.update({name: _resolve_attention_sizes(values[name], part.width) for name in ("attention", "cross")})

    return rebuild(config, edit)


def config_difference(a: ModelConfig, b: ModelConfig) -> str | None:
    """Return the first field of `a` that makes it compute something else than `b`, as "path=value", or None."""
    first, second = (config_to_tree(rebuild(resolve_sizes(config), _drop_training_fields)) for config in (a, b))
    return _tree_difference(first, second, "")


def _tree_difference(a: Any, b: Any, path: str) -> str | None:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(dict.fromkeys([*a, *b]), key=lambda key: key == "context")  # last: positions may decide it
        pairs = [(key, a.get(key), b.get(key)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(n), *values) for n, values in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, float) and isinstance(b, (int, float)) and math.isclose(a, b, rel_tol=1e-12):
        return None
    else:
        return None if a == b else f"{path}={short_repr(a)}"
    differences = (_tree_difference(x, y, f"{path}.{key}" if path else key) for key, x, y in pairs)
    return next((difference for difference in differences if difference), None)
