"""Everything that decoding prepares for a model, in one object that is freed with the model.

    prepared = prepare(model)       # None if the model cannot be decoded with an inference copy
    prepared.model                  # the inference copy
    release(model)                  # free everything now

A `PreparedModel` owns the inference copy, the beam-search operators, recorded CUDA graphs and the buffers of beam
searches that wait for the next call, and the quantized copies that propose tokens in speculative decoding.  It never
refers to the model itself, so all of this is freed when the model is freed.  A recorded round of speculative decoding
also refers to the inference copy of the draft.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

from monoblock.decoding.backends.cpu_search_operators import SearchOperators, build_search_operators
from monoblock.decoding.backends.cuda_graph import CudaGraphDecoderState
from monoblock.decoding.backends.inference_copy import build_inference_copy, reason_for_no_copy, refresh, signature
from monoblock.decoding.backends.search.cuda_search import BufferPool
from monoblock.decoding.backends.speculative_graph import SPARE_TOKENS, SpeculativeGraphState
from monoblock.nn.check_model import check_model
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.transformer import Transformer

_PREPARED: WeakKeyDictionary[Transformer, PreparedModel] = WeakKeyDictionary()
_lock = threading.RLock()


class PreparedModel:
    """What decoding has prepared for one model: its inference copy, search operators, CUDA graph and quantized drafts.

    Several threads may decode with it at the same time.
    """

    def __init__(self, model: Transformer) -> None:
        self.signature = signature(model)
        self.model = build_inference_copy(model)
        self._drafts: dict[str, tuple[Sequence[int], Transformer]] = {}  # by kind: weight versions, quantized copy
        self._idle_graphs: dict[type[CudaGraphDecoderState], CudaGraphDecoderState] = {}
        self._search_buffers = BufferPool(self.model)
        self._search_operators: SearchOperators | None = None
        self._has_search_operators = False

    def get_search_operators(self) -> SearchOperators | None:
        """Return the beam-search operators, built on first use; None if the model is not supported."""
        with _lock:
            if not self._has_search_operators:
                self._search_operators = build_search_operators(self.model)
                self._has_search_operators = True
            return self._search_operators

    def get_draft(self, kind: str, versions: Sequence[int], build: Callable[[], Transformer]) -> Transformer:
        """Return the quantized copy of a kind, built on first use and again when the versions of weights change."""
        with _lock:
            stored = self._drafts.get(kind)
            if stored is None or stored[0] != versions:
                with torch.inference_mode(False), torch.no_grad():
                    stored = self._drafts[kind] = versions, build()
            return stored[1]

    def make_graph_state(self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None) -> CudaGraphDecoderState:
        """Return a state that replays a CUDA graph: the one that an earlier call has kept, if it fits, or a new one."""
        return self._make_state(CudaGraphDecoderState, capacity, rows_per_prompt, prefill_chunk)

    def make_speculative_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None
    ) -> CudaGraphDecoderState:
        """Return a state that replays rounds of speculative decoding, likewise."""
        return self._make_state(SpeculativeGraphState, capacity + SPARE_TOKENS, rows_per_prompt, prefill_chunk)

    def _make_state(
        self, kind: type[CudaGraphDecoderState], capacity: int, rows_per_prompt: int, prefill_chunk: int | None
    ) -> CudaGraphDecoderState:
        with _lock:
            state = self._idle_graphs.pop(kind, None)
        if state is not None and state.fits(capacity, rows_per_prompt, prefill_chunk):
            return state
        shape, pool = (capacity, rows_per_prompt, prefill_chunk), self._search_buffers
        return kind(self.model, *shape, give_back=self._keep_graph, pool=pool)

    def _keep_graph(self, state: CudaGraphDecoderState) -> None:
        with _lock:
            self._idle_graphs[type(state)] = state


def prepare(model: Transformer) -> PreparedModel | None:
    """Return what decoding has prepared for a model: build it in the first call, update its weights in later ones.

    Return None if the model cannot be decoded with an inference copy (see `reason_for_no_copy`).
    """
    if reason_for_no_copy(model) is not None:
        return None
    with _lock:
        prepared = _PREPARED.get(model)
        if prepared is None or prepared.signature != signature(model):
            prepared = _PREPARED[model] = PreparedModel(model)
        else:
            refresh(prepared.model)
    return prepared


def release(model: Transformer) -> None:
    """Free everything that decoding has prepared for a model; the next call of `prepare` builds it again."""
    check_model(model, (Transformer, Recurrent), "release")
    with _lock:
        _PREPARED.pop(model, None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_inference_copy(model: Transformer) -> Transformer:
    """Return the inference copy of a model, or the model itself if it cannot be decoded with a copy."""
    prepared = prepare(model)
    return model if prepared is None else prepared.model
