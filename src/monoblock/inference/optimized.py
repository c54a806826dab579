"""A fast copy of a model for decoding.

    fast = mb.optimize(model)
    fast.generate(ids, max_new_tokens=50)       # the options and the tokens of model.generate

It is the one way to the C++ step on a CPU, to CUDA graphs and Triton kernels, to products with quantized weights and to
quantized copies that propose tokens (`draft="8-bit"`).  `mb.load` and the command line make one by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self, Unpack, overload

from torch import Tensor, nn

from monoblock.inference.generate import GenerateCall
from monoblock.inference.prepared_model import PreparedModel
from monoblock.nn.generation_options import GeneratedTokens, ModelOptions, TokenRows


class OptimizedModel(PreparedModel):
    """A snapshot of a model that decodes faster; made by `mb.optimize`.

    Changes of the model after `mb.optimize(model)` (training, hooks, new modules, another device) may or may not be
    seen: call `mb.optimize` again after them.  Several threads may decode with it at the same time.
    """

    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[False] = False, **options: Unpack[ModelOptions]
    ) -> Tensor: ...
    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[True], **options: Unpack[ModelOptions]
    ) -> GeneratedTokens: ...
    def generate(
        self, ids: TokenRows, *, return_scores: bool = False, **options: Unpack[ModelOptions]
    ) -> Tensor | GeneratedTokens:
        """Continue prompts, as `Transformer.generate` does, and return the same tokens."""
        return GenerateCall(self, ids, False, **options).run(return_scores=return_scores)

    def stream(self, ids: TokenRows, **options: Unpack[ModelOptions]) -> Iterator[Tensor]:
        """Yield the new tokens step by step, as `Transformer.stream` does."""
        return GenerateCall(self, ids, True, **options).stream()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def optimize(model: nn.Module, *, exact: bool = False) -> OptimizedModel:
    """Return a snapshot of a model that decodes faster, with the same tokens (see `OptimizedModel`).

    InputError names what cannot be honoured: hooks, subclasses and other modules, parametrizations, sharded weights,
    autocast, training mode, and the few kinds of blocks that have no fast path.

    exact: the bits of every logit depend on its request alone, not on what runs beside it (see inference/exact.py).

    The copy shares the weights of the model, except that a GPU has those of projections that are computed together once
    more.  `mb.load`, which owns its model, places them next to each other in memory, so that they are stored once.
    """
    return OptimizedModel(model, exact=exact)
