"""How many bytes a model takes: weights, gradients, optimizer, activations, and the keys and values kept in decoding.

A parameter trained in 16 bits with AdamW takes the usual 16 bytes: weight 2, gradient 2, a master copy in fp32 4, and
two moments in fp32 8; the copy is counted to the optimizer, which alone reads it.  In fp32 there is none, and it is
4 + 4 + 8.  What is held for the backward pass is listed in activations.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from monoblock.accounting.activations import activations, recurrent_activations
from monoblock.accounting.flops import Sizes
from monoblock.accounting.held import Held
from monoblock.accounting.parameters import block_counts, block_matrices, parameters
from monoblock.accounting.recurrent import recurrent_parameters
from monoblock.config import AttentionConfig, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, did_you_mean

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
TRAINED_IN = ("fp32", "bf16", "fp16")

# Optimizer -> the fp32 numbers it keeps for a weight: one in a matrix of a block, one anywhere else.
STATES = {"adamw": (2, 2), "adam": (2, 2), "muon": (1, 2), "momentum": (1, 1), "sgd": (0, 0)}


def stored_bytes(numbers: int, dtype: str) -> int:
    """So many numbers of a dtype, in whole bytes."""
    if dtype not in BITS:
        raise ConfigError(f"dtype={dtype!r} is none of {', '.join(BITS)}{did_you_mean(dtype, BITS)}")
    return -(-numbers * BITS[dtype] // 8)


def held_bytes(held: Held, dtype: str) -> tuple[int, int]:
    """Activations, and the attention matrices among them that a fused kernel never writes."""
    return stored_bytes(held.numbers, dtype) + 4 * held.singles + held.bytes, stored_bytes(held.matrices, dtype)


def attention_matrix_bytes(*, batch: int = 1, heads: int = 1, queries: int, keys: int | None = None, dtype: str) -> int:
    """The attention weights of one block: B · H · T · S."""
    return stored_bytes(batch * heads * queries * (keys or queries), dtype)


# -- decoding --------------------------------------------------------------------------------------------------------


def slot(attention: AttentionConfig, width: int) -> int:
    """Numbers kept for one place in one block: a key and a value for each key/value head."""
    return attention.groups * (attention.key_size(width) + attention.value_size(width))


def kv_cache(config: ModelConfig | RecurrentConfig, size: Sizes) -> int:
    """Numbers kept after `size.target` tokens; a block with a window keeps a ring of that many places."""
    if isinstance(config, RecurrentConfig) or config.decoder is None:
        return 0
    kept = 0
    for block, times in block_counts(config.decoder).items():
        places = min(size.target, block.attention.window or size.target)
        kept += times * places * slot(block.attention, block.width)
        if block.cross:
            kept += times * size.source * slot(block.cross, block.width)
    return size.batch * kept


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes on each GPU, by part."""

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


def training_bytes(
    config: ModelConfig | RecurrentConfig,
    size: Sizes,
    *,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    fused: bool = True,
    checkpointing: bool = False,
    gpus: int = 1,
) -> TrainingBytes:
    """A step of `size.batch` sequences on each GPU; weights, gradients and optimizer are shared out among the GPUs."""
    if dtype not in TRAINED_IN:
        raise ConfigError(f"dtype={dtype!r} is not trained in; write {', '.join(TRAINED_IN)}")
    if optimizer not in STATES:
        raise ConfigError(f"optimizer={optimizer!r} is none of {', '.join(STATES)}{did_you_mean(optimizer, STATES)}")
    if gpus < 1:
        raise ConfigError(f"gpus={gpus} cannot be; write 1 or more")
    if isinstance(config, RecurrentConfig):
        count, matrices = sum(recurrent_parameters(config).values()), 0
        held = recurrent_activations(config, size)
    else:
        count, matrices = sum(parameters(config).values()), block_matrices(config)
        held = activations(config, size, fused=fused, checkpointing=checkpointing)
    in_blocks, elsewhere = STATES[optimizer]
    master = 0 if dtype == "fp32" else count
    states = master + in_blocks * matrices + elsewhere * (count - matrices)
    kept, attention = held_bytes(held, dtype)
    return TrainingBytes(
        weights=-(-stored_bytes(count, dtype) // gpus),
        gradients=-(-stored_bytes(count, dtype) // gpus),
        optimizer=-(-4 * states // gpus),
        activations=kept,
        attention_matrices=attention,
    )
