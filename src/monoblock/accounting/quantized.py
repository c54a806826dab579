"""Bytes of the weights of a model, of which some matrices may be stored as small whole numbers (`config.quantize`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monoblock.accounting.memory import stored_bytes
from monoblock.accounting.parameters import (
    Linear,
    attention_linears,
    block_counts,
    feedforward_linears,
    head_linears,
    parameters,
    projection_linear,
    router_linear,
)
from monoblock.config import BlockConfig, EmbeddingConfig, ModelConfig


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """All weights: quantised matrices as they are packed, the rest in `dtype`."""
    count = sum(parameters(config).values())
    if config.quantize is None:
        return stored_bytes(count, dtype)
    packed = list(_matrices(config))
    rest = count - sum(linear.matrix for linear in packed)
    return _packed(config, packed) + stored_bytes(rest, dtype)


def block_bytes(config: ModelConfig, block: BlockConfig, dtype: str, experts: int | None = None) -> int:
    """The matrices of a block, with so many of its experts (None: all); a router is never quantised."""
    router = router_linear(block.feedforward, block.width)
    return _read(config, _of_block(block, experts), dtype) + (stored_bytes(router.matrix, dtype) if router else 0)


def head_bytes(config: ModelConfig, dtype: str) -> int:
    """The matrices after the last stack, tied ones too: they are read all the same."""
    return _read(config, [_named(linear) for linear in head_linears(config)], dtype)


def _read(config: ModelConfig, linears: Iterable[Linear], dtype: str) -> int:
    linears = list(linears)
    if config.quantize is None:
        return stored_bytes(sum(linear.matrix for linear in linears), dtype)
    return _packed(config, linears)


def _packed(config: ModelConfig, linears: Iterable[Linear]) -> int:
    scheme = config.quantize
    assert scheme is not None
    return sum(
        scheme.stored_bytes(one.inputs, one.outputs, table=one.name in ("token", "head.output")) for one in linears
    )


def _of_block(block: BlockConfig, experts: int | None = None) -> Iterator[Linear]:
    yield from attention_linears(block.attention, block.width)
    yield from attention_linears(block.cross, block.width) if block.cross else ()
    routed = block.feedforward.experts
    copies = 1 if routed is None else routed.count if experts is None else experts
    for linear in feedforward_linears(block.feedforward, block.width):
        yield from [linear] * copies


def _matrices(config: ModelConfig) -> Iterator[Linear]:
    """Every matrix that is quantised, once."""
    for place, given in config.inputs.items():
        if isinstance(given, EmbeddingConfig):
            if place == "input" or config.tie not in ("source_target", "three_way"):
                yield Linear("token", given.dim or config.width, given.vocab)
            projection = projection_linear(given, config.width)
            yield from [projection] if projection else []
    for stack in config.stacks.values():
        for block, times in block_counts(stack, owned=True).items():
            yield from list(_of_block(block)) * times
    yield from (_named(linear) for linear in head_linears(config) if not linear.tied)


def _named(linear: Linear) -> Linear:
    """A head's output matrix by its name in the model, for a block has an output as well."""
    return linear._replace(name="head.output") if linear.name == "output" else linear
