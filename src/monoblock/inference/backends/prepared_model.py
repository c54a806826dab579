"""What decodes a model fast, in one object: its fast copy, search operators, CUDA graphs and quantized copies."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Literal

import torch
from torch import nn

from monoblock.config.model import ModelConfig
from monoblock.errors import InputError
from monoblock.inference.backends.cpu_search_operators import SearchOperators, build_search_operators
from monoblock.inference.backends.cuda_graph import CudaGraphDecoderState
from monoblock.inference.backends.search.cuda_search import BufferPool
from monoblock.inference.backends.speculative_graph import SPARE_TOKENS, SpeculativeGraphState
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.check_model import check_model
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize

DRAFT_BITS: dict[str, Literal[4, 8]] = {"8-bit": 8, "4-bit": 4}


class PreparedModel:
    """The fast copy of a model with its search operators, recorded graphs and quantized copies (see `OptimizedModel`).

    Several threads may decode with it at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        check_model(model, Transformer, "optimize")
        assert isinstance(model, Transformer)
        if (reason := reason_not_to_optimize(model)) is not None:
            raise InputError(f"this model cannot be optimized: {reason}; call model.generate, which runs its modules")
        self.plain = model
        self.model = build_fast_model(model)
        self._drafts: dict[str, PreparedModel] = {}
        self._idle_graphs: dict[type[CudaGraphDecoderState], CudaGraphDecoderState] = {}
        self._search_buffers = BufferPool(self.model)
        self._search_operators: list[SearchOperators | None] = []  # empty until they are first asked for
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
            self._drafts, self._idle_graphs, self._search_operators = {}, {}, []
            self._search_buffers = BufferPool(self.model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __repr__(self) -> str:
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"{type(self).__name__}({self.config.family}, {self.device}{bits})"

    def search_operators(self) -> SearchOperators | None:
        """Return the beam-search operators, built on first use; None if the model is not supported."""
        with self._lock:
            if not self._search_operators:
                self._search_operators = [build_search_operators(self.model)]
            return self._search_operators[0]

    def draft(self, kind: str) -> PreparedModel:
        """Return the copy of the model quantized to "8-bit" or "4-bit", made on first use."""
        with self._lock:
            if kind not in self._drafts:
                with torch.inference_mode(False), torch.no_grad():
                    self._drafts[kind] = PreparedModel(quantize(self.plain, bits=DRAFT_BITS[kind]).eval())
            return self._drafts[kind]

    def make_graph_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> CudaGraphDecoderState:
        """Return a state that replays a CUDA graph: the one that an earlier call has kept, if it fits, or a new one."""
        kind = SpeculativeGraphState if speculative else CudaGraphDecoderState
        capacity += SPARE_TOKENS if speculative else 0
        with self._lock:
            state = self._idle_graphs.pop(kind, None)
        if state is not None and state.fits(capacity, rows_per_prompt, prefill_chunk):
            return state
        return kind(
            self.model,
            capacity,
            rows_per_prompt,
            prefill_chunk,
            give_back=partial(_keep_graph, weakref.ref(self)),
            pool=self._search_buffers,
        )


def _keep_graph(owner: weakref.ref[PreparedModel], state: CudaGraphDecoderState) -> None:
    """Keep an idle state for the next call; the state holds no reference to its owner, so both are freed at once."""
    prepared = owner()
    if prepared is not None:
        with prepared._lock:
            prepared._idle_graphs[type(state)] = state


GenerativeModel = Transformer | PreparedModel  # what the engine decodes
