"""Activation checkpointing: training keeps few activations of a block and recomputes the others in the backward pass.

True          keeps the input of the block only (Chen et al. 2016): least memory, a third more computation
"selective"   also keeps the outputs of linear layers and of fused attention, which are expensive to compute, and
              recomputes the rest: norms, activation functions, dropout, and attention without a fused kernel, whose
              scores would take much memory.  FlexAttention is recomputed unless the model is compiled: it is compiled
              by itself, so that torch cannot keep its outputs.  A block with batch norms is recomputed as with True,
              because torch requires the same operators, and their statistics are not updated again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monoblock.config.parts import CheckpointMode
from monoblock.nn.norm import frozen_statistics, has_statistics

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
KERNEL_NAMESPACES = ("monoblock", "monoblock_python")  # of the operators in kernels/
KEPT_OPERATORS = ("mm", "addmm", "_scaled_mm", "convolution")  # of aten, besides attention


def run_checkpointed(block: nn.Module, *inputs: Any, mode: CheckpointMode, **options: Any) -> Tensor:
    """Run a block in training, and recompute it in the backward pass as far as `mode` says."""
    if not torch.compiler.is_compiling():
        options["context_fn"] = functools.partial(_eager_contexts, block, mode)
    elif mode == "selective":  # torch.compile recomputes operators, not the block, so there is no state to restore
        options["context_fn"] = _selective_contexts
    is_cached = mode != "selective" or torch.compiler.is_compiling()
    with nullcontext() if is_cached else _without_weight_cache():
        out: Tensor = checkpoint(block, *inputs, use_reentrant=False, **options)
    return out


@contextmanager
def _without_weight_cache() -> Iterator[None]:
    """Convert weights at every use under autocast, so that a block that runs twice has the same operators each time.

    `checkpoint` recomputes with this setting too.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_choose_policy)


def _choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the outputs of an operator are kept."""
    namespace, name = "", str(operator)  # of a higher-order operator, such as flex_attention
    if isinstance(operator, torch._ops.OpOverload):
        namespace, name = operator.namespace, operator._schema.name.split("::")[1]  # "aten", "addmm"
    is_kept = "attention" in name or name in KEPT_OPERATORS or namespace in KERNEL_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _eager_contexts(block: nn.Module, mode: CheckpointMode) -> Contexts:
    """Return the contexts of the forward pass and of the recomputation, in which no batch is counted twice."""
    is_selective = mode == "selective" and not has_statistics(block)
    forward, recomputation = _selective_contexts() if is_selective else (nullcontext(), nullcontext())

    @contextmanager
    def restored_state() -> Iterator[None]:
        with frozen_statistics(block), recomputation:
            yield

    return forward, restored_state()
