"""The size of a model's weights in bytes, quantized if `config.quantize` is set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monoblock.accounting.memory import stored_bytes
from monoblock.accounting.parameters import (
    LinearShape,
    block_linears,
    count_blocks,
    count_parameters,
    head_linears,
    projection_linear,
    router_linear,
)
from monoblock.config.model import BlockConfig, EmbeddingConfig, ModelConfig


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the size of all weights in bytes: matrices packed if the model is quantized, other weights in `dtype`."""
    count = sum(count_parameters(config).values())
    if config.quantize is None:
        return stored_bytes(count, dtype)
    quantized = list(_quantized_linears(config))
    rest = count - sum(linear.num_weights for linear in quantized)
    return _packed_bytes(config, quantized) + stored_bytes(rest, dtype)


def block_bytes(config: ModelConfig, block: BlockConfig, dtype: str, experts: int | None = None) -> int:
    """Return the size of a block's matrices in bytes, including those of `experts` experts (None: all).

    The router is not quantized.
    """
    router = router_linear(block.feedforward, block.width)
    router_bytes = stored_bytes(router.num_weights, dtype) if router else 0
    return _bytes_read(config, block_linears(block, experts), dtype) + router_bytes


def head_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the size in bytes of the matrices that the head reads, including one that is tied to the embedding."""
    return _bytes_read(config, [_rename_head_output(linear) for linear in head_linears(config)], dtype)


def _bytes_read(config: ModelConfig, linears: Iterable[LinearShape], dtype: str) -> int:
    linears = list(linears)
    if config.quantize is None:
        return stored_bytes(sum(linear.num_weights for linear in linears), dtype)
    return _packed_bytes(config, linears)


def _packed_bytes(config: ModelConfig, linears: Iterable[LinearShape]) -> int:
    scheme = config.quantize
    assert scheme is not None
    return sum(
        scheme.packed_bytes(linear.inputs, linear.outputs, is_vocab_matrix=linear.name in ("token", "head.output"))
        for linear in linears
    )


def _quantized_linears(config: ModelConfig) -> Iterator[LinearShape]:
    """Yield every matrix that is quantized, and tied matrices only once."""
    for name, input_config in config.inputs.items():
        if isinstance(input_config, EmbeddingConfig):
            if name == "input" or config.tie not in ("source_target", "three_way"):
                yield LinearShape("token", input_config.dim or config.width, input_config.vocab)
            projection = projection_linear(input_config, config.width)
            yield from [projection] if projection else []
    for stack in config.stacks.values():
        for block, times in count_blocks(stack, owned_only=True).items():
            yield from list(block_linears(block)) * times
    yield from (_rename_head_output(linear) for linear in head_linears(config) if not linear.tied)


def _rename_head_output(linear: LinearShape) -> LinearShape:
    """Rename the "output" of the head to "head.output", because attention has an "output" matrix too."""
    return linear._replace(name="head.output") if linear.name == "output" else linear
