"""Run a function of tensors and its gradient as CUDA graphs in training.

For each batch, cuDNN launches thousands of small kernels to run an LSTM, and a fast GPU waits for most of the launches.
A CUDA graph launches all kernels of a forward or backward pass at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

MAX_SHAPES = 4  # how many graphs are recorded; inputs of further shapes run without


class TrainingGraphs:
    """CUDA graphs of a function, one for each combination of input shapes, recorded at the first call with them.

    The results and the gradients of a call are stored where those of the last call were.  So each result must be used,
    and each gradient must be applied, before the next call; `supports` is false while gradients are kept.
    """

    def __init__(self) -> None:
        self.recorded: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}

    def supports(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
        """Return whether a call can run as a graph: on a GPU, without autocast, and as the first of a step."""
        return (
            inputs[0].is_cuda
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cuda")
            and all(weight.grad is None for weight in weights)
            and (_signature(inputs) in self.recorded or len(self.recorded) < MAX_SHAPES)
        )

    def run(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return function(*inputs, *weights); the weights must stay where they are in memory."""
        key = _signature(inputs)
        if key not in self.recorded:
            self.recorded[key] = _record(function, inputs, weights)
        return self.recorded[key](*inputs, *weights)


def _signature(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in inputs)


def _record(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Callable[..., tuple[Tensor, ...]]:
    """Record a function.  Random numbers continue as if it had not run, so that a resumed training is the same."""
    random_state = torch.cuda.get_rng_state(inputs[0].device)
    samples = [torch.zeros_like(tensor).requires_grad_(tensor.requires_grad) for tensor in inputs]
    recorded = torch.cuda.make_graphed_callables(function, (*samples, *weights))
    torch.cuda.set_rng_state(random_state, inputs[0].device)
    return cast(Callable[..., tuple[Tensor, ...]], recorded)
