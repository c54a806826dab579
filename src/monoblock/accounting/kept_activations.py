"""What a block keeps from the forward to the backward pass with activation checkpointing.

    True           its input
    "selective"    its input, and the outputs of its matrices (also of each expert and the router) and of a fused
                   attention kernel, with its log-sum-exp. Attention without such a kernel is recomputed, and so is
                   FlexAttention: it is compiled, so that checkpointing does not see it.

While a block is recomputed it has all its activations (activations.py); outputs that autograd does not save, as those
of the last matrix of attention, are released again. A block with batch norms is recomputed as with True.
"""

from __future__ import annotations

from monoblock.accounting.flops import BatchShape
from monoblock.accounting.parameters import attention_linears, feedforward_linears, router_linear
from monoblock.accounting.saved_activations import SavedActivations, add_activations, choose_kernel
from monoblock.config.model import AttentionConfig, BlockConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import ConfigError

CHECKPOINT_MODES: tuple[CheckpointMode, ...] = (False, "selective", True)  # from most to least memory


def block_mode(block: BlockConfig, checkpointing: CheckpointMode) -> CheckpointMode:
    """Return how a block is recomputed: with batch norms entirely or not at all."""
    if checkpointing not in CHECKPOINT_MODES:
        raise ConfigError(f"checkpointing={checkpointing!r} is not one of {', '.join(map(repr, CHECKPOINT_MODES))}")
    norms = [block.norm, *(a.qk_norm for a in (block.attention, block.cross) if a is not None)]
    has_statistics = any(norm is not None and norm.kind == "batch" for norm in norms)
    return bool(checkpointing) if has_statistics else checkpointing


def recomputes_attention(attention: AttentionConfig, width: int, length: int) -> bool:
    """Return whether selective checkpointing recomputes self-attention, because it has no kernel that can be kept."""
    return choose_kernel(attention, width, length, length, fused=True) != "fused"


def product_outputs(block: BlockConfig, shape: BatchShape, length: int, *, fused: bool = False) -> SavedActivations:
    """Count the outputs of the products of a block, which selective checkpointing keeps."""
    outputs = [
        _attention_outputs(block.attention, block.width, shape.batch, length, length, fused=fused),
        _feedforward_outputs(block, shape.batch * length),
    ]
    if block.cross:
        outputs.append(_attention_outputs(block.cross, block.width, shape.batch, length, shape.source, fused=fused))
    return add_activations(*outputs)


def _attention_outputs(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool
) -> SavedActivations:
    query, key, value, output = attention_linears(attention, width)
    kernel = choose_kernel(attention, width, queries, keys, fused=fused)
    elements = queries * (query.outputs + output.outputs) + keys * (key.outputs + value.outputs)
    if kernel != "fused":
        return SavedActivations(batch * elements)
    return SavedActivations(
        batch * (elements + queries * output.inputs), fp32_elements=batch * attention.heads * queries
    )


def _feedforward_outputs(block: BlockConfig, rows: int) -> SavedActivations:
    experts, router = block.feedforward.experts, router_linear(block.feedforward, block.width)
    outputs = sum(linear.outputs for linear in feedforward_linears(block.feedforward, block.width))
    if experts is None or router is None:
        return SavedActivations(rows * outputs)
    return SavedActivations(rows * (experts.top_k * outputs + router.outputs))
