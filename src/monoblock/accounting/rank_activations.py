"""The bytes of the activations of a block on one rank; rank_memory.py explains them."""

from __future__ import annotations

from typing import NamedTuple

from monoblock.accounting.activations import block_activations
from monoblock.accounting.flops import BatchShape
from monoblock.accounting.kept_activations import product_outputs
from monoblock.accounting.memory import activation_bytes
from monoblock.accounting.parallel import narrow_block
from monoblock.accounting.parameters import count_norms
from monoblock.accounting.saved_activations import SavedActivations
from monoblock.config.model import BlockConfig, Buckets, NormConfig
from monoblock.config.parts import CheckpointMode


class Precision(NamedTuple):
    """The bytes of an element of the residual stream, and of the input of a norm by the kind of norm."""

    stream: int
    layer_norm: int
    rms_norm: int

    def norm_extra(self, norm: NormConfig | None, elements: int) -> int:
        """Return the bytes that a norm saves for its input beyond two an element."""
        if norm is None or norm.kind == "none":
            return 0
        return elements * ((self.rms_norm if norm.kind == "rms" else self.layer_norm) - 2)

    def norm_working(self, norm: NormConfig | None, elements: int) -> int:
        """Return the bytes that the backward pass of a norm needs: an RMS norm of 16-bit input is computed in fp32."""
        return RMS_WORKING_BYTES * elements if norm is not None and norm.kind == "rms" and self.rms_norm == 6 else 0


RMS_WORKING_BYTES = 28  # for each element: seven fp32 tensors
AUTOCAST = Precision(stream=4, layer_norm=4, rms_norm=4)
SHARDED = Precision(stream=2, layer_norm=4, rms_norm=6)


def saved_bytes(saved: SavedActivations) -> int:
    return sum(activation_bytes(saved, "bf16"))


def block_bytes(block: BlockConfig, shape: BatchShape, length: int, tensor: int, precision: Precision) -> int:
    """Return the bytes of the activations that a block saves on one rank of a tensor-parallel group."""
    narrow, rows, width = narrow_block(block, tensor), shape.batch * length, block.width
    saved = saved_bytes(block_activations(narrow, shape, length, fused=True))
    saved += precision.norm_extra(block.norm, count_norms(block) * rows * width)
    if block.is_parallel:
        saved += 2 * rows * width  # each branch converts the input
    if block.cross:
        saved += 2 * 2 * shape.batch * shape.source * width  # keys and values convert the encoder output
    return saved


def kept_bytes(
    block: BlockConfig, shape: BatchShape, length: int, tensor: int, precision: Precision, mode: CheckpointMode
) -> int:
    """Return the bytes of those that exist from the forward to the backward pass."""
    if not mode:
        return block_bytes(block, shape, length, tensor, precision)
    block_input = precision.stream * shape.batch * length * block.width
    if mode is True:
        return block_input
    outputs = product_outputs(narrow_block(block, tensor), shape, length, fused=True)
    return block_input + saved_bytes(outputs)


def working_bytes(block: BlockConfig, batch: int, length: int, tensor: int, precision: Precision) -> int:
    """Estimate the gradients of activations at the start of the backward pass of a block.

    These are those of the hidden features of the feed-forward network, of the residual stream, and of a learned bias on
    the scores.
    """
    rows, experts, attention = batch * length, block.feedforward.experts, block.attention
    hidden = rows * (experts.top_k if experts else 1) * block.feedforward.hidden // tensor
    bias = attention.heads // tensor * length**2 if isinstance(attention.positions, Buckets) else 0
    return 2 * hidden * (3 if block.feedforward.gated else 2) + precision.stream * rows * block.width + 2 * bias
