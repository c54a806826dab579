"""A fast copy of a model for decoding, with its recorded CUDA graphs and quantized copies.

    fast = mb.optimize(model)
    fast.generate(ids, max_new_tokens=50)       # the options and the tokens of model.generate

It is the one way to the C++ step on a CPU, to CUDA graphs and Triton kernels, to products with quantized weights and to
quantized copies that propose tokens (`draft="8-bit"`).  `mb.load` and the command line make one by themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, Unpack, overload

import torch
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.errors import InputError
from monoblock.inference.exact import reason_not_exact
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.pages import Pages
from monoblock.inference.runners.cuda import CudaRunner, DevicePages, supports_cuda_graph
from monoblock.inference.runners.plain import ModelRunner
from monoblock.inference.settings import DRAFT_BITS
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.arguments import check_model
from monoblock.nn.generation_options import GeneratedTokens, ModelOptions, TokenRows
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize


def optimize(model: nn.Module, *, exact: bool = False) -> OptimizedModel:
    """Return a snapshot of a model that decodes faster, with the same tokens (see `OptimizedModel`).

    InputError names what cannot be honoured: hooks, subclasses and other modules, parametrizations, sharded weights,
    autocast, training mode, and the few kinds of blocks that have no fast path.

    exact: the bits of every logit depend on its request alone, not on what runs beside it (see inference/exact.py).

    The copy shares the weights of the model, except that a GPU has those of projections that are computed together once
    more.  `mb.load`, which owns its model, places them next to each other in memory, so that they are stored once.
    """
    if isinstance(model, OptimizedModel):
        raise InputError("this model is optimized already; use it as it is, or give optimize the plain model")
    check_model(model, Transformer, "optimize")
    assert isinstance(model, Transformer)
    if (reason := reason_not_to_optimize(model)) is not None:
        raise InputError(f"this model cannot be optimized: {reason}; call model.generate, which runs its modules")
    if exact and (reason := reason_not_exact(model)) is not None:
        raise InputError(f"this model has no exact mode: {reason}; leave out exact=True")
    return OptimizedModel(model, exact=exact)


class OptimizedModel:
    """A snapshot of a model that decodes faster; made by `mb.optimize`.

    Changes of the model after `mb.optimize(model)` (training, hooks, new modules, another device) may or may not be
    seen: call `mb.optimize` again after them.  Several threads may decode with it at the same time.
    """

    def __init__(self, model: Transformer, *, exact: bool = False) -> None:
        self.plain, self.exact = model, exact
        self.model = build_fast_model(model, exact=exact)
        self._drafts: dict[str, OptimizedModel] = {}
        self._idle_pages: list[DevicePages] = []  # of the engine that ended last
        self._lock = threading.RLock()

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
        from monoblock.inference.generate import GenerateCall

        return GenerateCall(self, ids, False, **options).run(return_scores=return_scores)

    def stream(self, ids: TokenRows, **options: Unpack[ModelOptions]) -> Iterator[Tensor]:
        """Yield the new tokens step by step, as `Transformer.stream` does."""
        from monoblock.inference.generate import GenerateCall

        return GenerateCall(self, ids, True, **options).stream()

    @property
    def config(self) -> ModelConfig:
        return self.plain.config

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def bits(self) -> int | None:
        """The bits of a quantized weight; None if the weights are not quantized."""
        return None if self.config.quantize is None else self.config.quantize.bits

    def close(self) -> None:
        """Free recorded graphs, buffers and quantized copies; they are made again when they are needed."""
        with self._lock:
            self._drafts, self._idle_pages = {}, []
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __repr__(self) -> str:
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"OptimizedModel({self.config.family}, {self.device}{bits})"

    def draft(self, kind: str) -> OptimizedModel:
        """Return the copy of the model quantized to "8-bit" or "4-bit", made on first use."""
        with self._lock:
            if kind not in self._drafts:
                with torch.inference_mode(False), torch.no_grad():
                    self._drafts[kind] = optimize(quantize(self.plain, bits=DRAFT_BITS[kind]).eval())
            return self._drafts[kind]

    def make_runner(
        self, pages: Pages, sources: Pages, adapters: Mapping[str, Transformer] | None = None
    ) -> ModelRunner:
        """Return what runs the fast copy, on a GPU with the recordings of the engine that ended last."""
        options: dict[str, Any] = {"plain": self.plain, "adapters": adapters, "exact": self.exact}
        if not supports_cuda_graph(self.model):
            return ModelRunner(self.model, pages, sources, **options)
        with self._lock:
            memory = self._idle_pages.pop() if self._idle_pages else DevicePages(self.model)
        runner = CudaRunner(self.model, pages, sources, memory=memory, **options)
        weakref.finalize(runner, _give_back, weakref.ref(self), memory).atexit = False
        return runner


def _give_back(owner: weakref.ref[OptimizedModel], memory: DevicePages) -> None:
    """Keep the pages of an engine that has ended for the next one."""
    if (model := owner()) is not None:
        with model._lock:
            model._idle_pages = [memory]


GenerativeModel = Transformer | OptimizedModel  # what the engine decodes
