"""The memory of the loss, and the sizes of the operator that computes it with the last matrix product.

That operator (kernels/linear_cross_entropy.py) computes the logits of a part of the tokens at a time, and in the
forward pass already the gradients of its input, weight and bias. These exist until the backward pass, which multiplies
them, so that there are two of each for a moment. It is used on a GPU if every rank has the whole weight and computes
the whole model: on one GPU, with ddp, and with fsdp, which gathers the weight in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

from monoblock.accounting.flops import BatchShape
from monoblock.accounting.parallel import ParallelPlan
from monoblock.accounting.parameters import LinearShape, head_linears
from monoblock.accounting.rank_activations import AUTOCAST, Precision
from monoblock.config.model import ModelConfig
from monoblock.config.parts import VOCABULARY_HEADS

MAX_LOGITS = 1 << 29  # logits computed at a time: 1 GiB in 16 bits
MIN_CLASSES = 1024  # with fewer, the logits are small
COLUMN_MULTIPLE = 64  # tensor cores are slow if the number of columns is not a multiple of 8


def pad_classes(classes: int) -> int:
    """Return the number of columns of the logits: the classes, rounded up to a multiple of COLUMN_MULTIPLE."""
    return -(-classes // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def rows_at_a_time(rows: int, columns: int) -> int:
    """Return the number of rows of which the logits are computed at a time, a multiple of 128 if not all."""
    parts = -(-rows * columns // MAX_LOGITS)
    return -(-rows // (128 * parts)) * 128 if parts > 1 else rows


def fuses_loss(config: ModelConfig, plan: ParallelPlan) -> bool:
    """Return whether the trainer computes the loss of a model together with the last matrix product."""
    head = config.head
    if head is None or head.kind not in VOCABULARY_HEADS or head.softcap is not None or head.teacher:
        return False
    return plan.tensor == plan.pipeline == 1 and _output_linear(config).outputs >= MIN_CLASSES


class LossBytes(NamedTuple):
    """The bytes of the loss and of the last matrix product, without the input of the product."""

    saved: int = 0  # from the forward to the backward pass
    copies: int = 0  # 16-bit copies of the weight over the same time
    forward: int = 0  # in the forward pass only
    backward: int = 0  # at the start of the backward pass, while all that is saved exists
    end: int = 0  # at the end of its backward pass


def plain_loss_bytes(config: ModelConfig, shape: BatchShape, tensor: int, precision: Precision) -> LossBytes:
    """Return the bytes of a loss that is computed from the logits: their log-softmax and two gradients, in fp32."""
    linear = _output_linear(config)
    logits = -(-_count_rows(linear, shape) * linear.outputs // tensor)
    if config.head is not None and config.head.kind == "pooled":
        logits = 0
    copies = 2 * (linear.num_weights // tensor) if precision is AUTOCAST else 0
    return LossBytes(4 * logits, copies, forward=6 * logits, backward=8 * logits)


def fused_loss_bytes(config: ModelConfig, shape: BatchShape, precision: Precision) -> LossBytes:
    """Return the bytes of the operator.

    The gradient of the input is as large as the input, which is not saved, so neither is counted here as saved.
    """
    assert config.head is not None
    linear = _output_linear(config)
    rows, columns = _count_rows(linear, shape), pad_classes(linear.outputs)
    size = linear.inputs + (config.head.bias != "none")
    hidden = 2 * rows * linear.inputs
    logits = 2 * rows_at_a_time(rows, columns) * columns
    table = 2 * columns * linear.inputs
    if precision is AUTOCAST:  # the gradient of an fp32 weight is fp32; the input is converted
        gradient = 4 * linear.outputs * size
        return LossBytes(
            4 * columns * size, forward=hidden + table + logits, backward=hidden + gradient, end=3 * hidden
        )
    summed = 4 * columns * size  # in fp32, and after the last logits converted to the 16 bits of the gathered weight
    saved = 2 * linear.outputs * size
    padded = table if columns > linear.outputs else 0
    return LossBytes(saved, forward=summed + padded + max(0, logits - saved), backward=hidden)


def _output_linear(config: ModelConfig) -> LinearShape:
    """Return the last matrix product of the head; one without outputs if there is none."""
    linears = (linear for linear in head_linears(config) if linear.name == "output")
    return next(linears, LinearShape("output", config.width, 0))


def _count_rows(linear: LinearShape, shape: BatchShape) -> int:
    return shape.batch * (shape.target if linear.applied_to == "tokens" else 1)
