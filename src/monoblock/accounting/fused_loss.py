"""When the trainer computes the loss together with the last matrix product, and the sizes of that operator.

It (kernels/linear_cross_entropy.py) computes the logits of a part of the tokens at a time, and in the forward pass
already the gradients of its input, weight and bias. It is used on a GPU if every rank has the whole weight and computes
the whole model: on one GPU, with ddp, and with fsdp, which gathers the weight in 16 bits.
"""

from __future__ import annotations

from monoblock.accounting.parallel import ParallelPlan
from monoblock.accounting.parameters import LinearShape, head_linears
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
    return plan.tensor == plan.pipeline == 1 and output_linear(config).outputs >= MIN_CLASSES


def output_linear(config: ModelConfig) -> LinearShape:
    """Return the last matrix product of the head; one without outputs if there is none."""
    linears = (linear for linear in head_linears(config) if linear.name == "output")
    return next(linears, LinearShape("output", config.width, 0))
