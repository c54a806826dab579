"""Everything needed to decode a model fast: its fast copy, CUDA graphs and quantized copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from monoblock.config.model import ModelConfig
from monoblock.errors import InputError
from monoblock.inference.exact import reason_not_exact
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.pages import Pages
from monoblock.inference.runners.cuda import CudaRunner, DevicePages, supports_cuda_graph
from monoblock.inference.runners.plain import ModelRunner, make_cache
from monoblock.inference.settings import DRAFT_BITS
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.arguments import check_model
from monoblock.nn.paged_cache import PagedCache
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize

MAX_IDLE_BYTES = 256 << 20  # of keys and values that an optimized model keeps in main memory between two calls


class PreparedModel:
    """The fast copy of a model with its recorded graphs and quantized copies (see `OptimizedModel`).

    Several threads may decode with it at the same time.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False) -> None:
        if isinstance(model, PreparedModel):
            raise InputError("this model is optimized already; use it as it is, or give optimize the plain model")
        check_model(model, Transformer, "optimize")
        assert isinstance(model, Transformer)
        if (reason := reason_not_to_optimize(model)) is not None:
            raise InputError(f"this model cannot be optimized: {reason}; call model.generate, which runs its modules")
        if exact and (reason := reason_not_exact(model)) is not None:
            raise InputError(f"this model has no exact mode: {reason}; leave out exact=True")
        self.plain, self.exact = model, exact
        self.model = build_fast_model(model, exact=exact)
        self._drafts: dict[str, PreparedModel] = {}
        self._idle_pages: list[DevicePages | PagedCache] = []  # of the engine that ended last
        self._lock = threading.RLock()

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

    def __repr__(self) -> str:
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"{type(self).__name__}({self.config.family}, {self.device}{bits})"

    def draft(self, kind: str) -> PreparedModel:
        """Return the copy of the model quantized to "8-bit" or "4-bit", made on first use."""
        with self._lock:
            if kind not in self._drafts:
                with torch.inference_mode(False), torch.no_grad():
                    self._drafts[kind] = PreparedModel(quantize(self.plain, bits=DRAFT_BITS[kind]).eval())
            return self._drafts[kind]

    def make_runner(
        self, pages: Pages, sources: Pages, adapters: Mapping[str, Transformer] | None = None
    ) -> ModelRunner:
        """Return what runs the fast copy, in the memory of the engine that ended last."""
        options: dict[str, Any] = {"plain": self.plain, "adapters": adapters, "exact": self.exact}
        is_recorded = supports_cuda_graph(self.model)
        with self._lock:
            memory: Any = self._idle_pages.pop() if self._idle_pages else None
        if is_recorded:
            memory = memory or DevicePages(self.model)
            runner: ModelRunner = CudaRunner(self.model, pages, sources, memory=memory, **options)
        else:
            memory = memory or make_cache(self.model)
            runner = ModelRunner(self.model, pages, sources, cache=memory, **options)
        weakref.finalize(runner, _give_back, weakref.ref(self), memory).atexit = False
        return runner


def _give_back(owner: weakref.ref[PreparedModel], memory: DevicePages | PagedCache) -> None:
    """Keep the pages of an engine that has ended for the next one, unless they take much of the main memory."""
    if isinstance(memory, PagedCache) and memory.num_bytes > MAX_IDLE_BYTES:
        return
    if (prepared := owner()) is not None:
        with prepared._lock:
            prepared._idle_pages = [memory]


GenerativeModel = Transformer | PreparedModel  # what the engine decodes
