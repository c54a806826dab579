"""The memory of a model: weights, also quantized, gradients, optimizer, activations, and the key/value cache.

A parameter trained in 16 bits with AdamW takes 16 bytes: 2 for the weight, 2 for the gradient, 4 for an fp32 master
copy of the weight, and 8 for two fp32 moments. The master copy is counted with the optimizer. In fp32 there is no
master copy, and a parameter takes 4 + 4 + 8 bytes. The saved activations are described in activations.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from monoblock.accounting.activations import SavedActivations
from monoblock.accounting.flops import BatchShape
from monoblock.accounting.parameters import (
    LinearShape,
    block_linears,
    count_blocks,
    count_parameters,
    head_linears,
    projection_linear,
)
from monoblock.config.model import AttentionConfig, EmbeddingConfig, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, did_you_mean

DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
TRAINING_DTYPES = ("fp32", "bf16", "fp16")

Optimizer = Literal["adam", "adamw", "muon", "sgd"]  # the values of train.optimizer, built in training/optimizer.py
# Optimizer -> the number of fp32 states for each weight in the matrices of blocks, and for each other weight.
OPTIMIZER_STATES = {"adamw": (2, 2), "adam": (2, 2), "muon": (1, 2), "momentum": (1, 1), "sgd": (0, 0)}


def optimizer_states(optimizer: str, parameters: int, matrices: int) -> int:
    """Count the fp32 states of all parameters, of which `matrices` are in the matrices of blocks."""
    if optimizer not in OPTIMIZER_STATES:
        raise ConfigError(
            f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZER_STATES)}"
            f"{did_you_mean(optimizer, OPTIMIZER_STATES)}"
        )
    matrix_states, other_states = OPTIMIZER_STATES[optimizer]
    return matrix_states * matrices + other_states * (parameters - matrices)


def stored_bytes(count: int, dtype: str) -> int:
    """Return the size of `count` elements of `dtype` in bytes, rounded up."""
    if dtype not in DTYPE_BITS:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPE_BITS)}{did_you_mean(dtype, DTYPE_BITS)}")
    return -(-count * DTYPE_BITS[dtype] // 8)


def activation_bytes(saved: SavedActivations, dtype: str) -> tuple[int, int]:
    """Return the size in bytes of all saved activations except attention weights, and that of the attention weights."""
    return stored_bytes(saved.elements, dtype) + saved.raw_bytes, stored_bytes(saved.attention_elements, dtype)


def attention_matrix_bytes(*, batch: int = 1, heads: int = 1, queries: int, keys: int | None = None, dtype: str) -> int:
    """Return the size in bytes of the attention weights (B, H, T, S) of one block."""
    return stored_bytes(batch * heads * queries * (keys or queries), dtype)


# -- decoding --------------------------------------------------------------------------------------------------------


def kv_elements_per_position(attention: AttentionConfig, width: int) -> int:
    """Count the elements that one block caches for one position: a key and a value for each key/value head."""
    return attention.num_kv_heads * (attention.key_size(width) + attention.value_size(width))


def kv_cache_elements(config: ModelConfig | RecurrentConfig, shape: BatchShape) -> int:
    """Count the cached elements after `shape.target` tokens.

    A block with a window caches the tokens in it (`Cache` keeps up to chunk - 1 more, which are not counted), or all
    tokens if it has global tokens or random blocks too.  Linear attention is counted by `linear_state_elements`.
    """
    if isinstance(config, RecurrentConfig) or config.decoder is None:
        return 0
    elements = 0
    for block, times in count_blocks(config.decoder).items():
        positions = min(shape.target, block.attention.cached_window or shape.target)
        positions = 0 if block.attention.kind == "linear" else positions
        elements += times * positions * kv_elements_per_position(block.attention, block.width)
        if block.cross:
            elements += times * shape.source * kv_elements_per_position(block.cross, block.width)
    return shape.batch * elements


def linear_state_elements(attention: AttentionConfig, width: int) -> int:
    """Count the elements that linear attention caches for a sequence of any length: two sums for each key/value head.

    The last tokens, which `Cache` also keeps so that they can be dropped again, are not counted.
    """
    if attention.kind != "linear":
        return 0
    return attention.num_kv_heads * attention.key_size(width) * (attention.value_size(width) + 1)


def kv_cache_bytes(config: ModelConfig | RecurrentConfig, shape: BatchShape, dtype: str) -> int:
    """Return the size of the cache in bytes; the sums of linear attention are fp32 in any dtype."""
    sums = 0
    if isinstance(config, ModelConfig) and config.decoder is not None:
        blocks = count_blocks(config.decoder).items()
        sums = sum(times * linear_state_elements(block.attention, block.width) for block, times in blocks)
    return stored_bytes(kv_cache_elements(config, shape), dtype) + 4 * shape.batch * sums


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """The memory of a training step on each GPU, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    attention_matrices: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations + self.attention_matrices

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the size of all weights in bytes: matrices packed if the model is quantized, other weights in `dtype`."""
    count = sum(count_parameters(config).values())
    if config.quantize is None:
        return stored_bytes(count, dtype)
    matrices = [linear for linear in head_linears(config) if not linear.tied]
    for name, part in config.inputs.items():
        if isinstance(part, EmbeddingConfig):
            if name == "input" or config.tie not in ("source_target", "three_way"):
                matrices.append(LinearShape("token", part.dim or config.width, part.vocab, is_vocab_matrix=True))
            matrices += filter(None, [projection_linear(part, config.width)])
    for stack in config.stacks.values():
        for block, times in count_blocks(stack, owned_only=True).items():
            matrices += [*block_linears(block)] * times
    rest = count - sum(linear.num_weights for linear in matrices)
    return matrix_bytes(config, matrices, dtype) + stored_bytes(rest, dtype)


def matrix_bytes(config: ModelConfig, linears: Iterable[LinearShape], dtype: str) -> int:
    """Return the size in bytes of matrices, packed if the model is quantized; tied matrices are counted too."""
    scheme = config.quantize
    if scheme is None:
        return stored_bytes(sum(linear.num_weights for linear in linears), dtype)
    return sum(scheme.packed_bytes(one.inputs, one.outputs, is_vocab_matrix=one.is_vocab_matrix) for one in linears)
