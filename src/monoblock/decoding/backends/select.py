"""Choose the backend that decodes a model.

| backend    | when                                                                                             |
|------------|--------------------------------------------------------------------------------------------------|
| lstm       | an LSTM                                                                                          |
| uncached   | use_cache=False                                                                                  |
| cuda_graph | a GPU, modules of this package, blocks in its allow-list, no draft                               |
| cpu_search | several rows per prompt on a CPU with a compiler, blocks in its allow-list, no draft             |
| cached     | otherwise: on the inference copy, or on the model itself if it has hooks or user-defined modules |
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
from torch import Tensor

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.positions import Learned
from monoblock.decoding.backends.cpu_search import CpuSearchDecoderState
from monoblock.decoding.backends.cuda_graph import supports_cuda_graph
from monoblock.decoding.backends.custom_modules import reason_to_run_as_is
from monoblock.decoding.backends.eager import CachedDecoderState, UncachedDecoderState
from monoblock.decoding.backends.lstm import LSTMDecoderState
from monoblock.decoding.backends.model_version import ModelVersion
from monoblock.decoding.backends.prepared_model import prepare
from monoblock.decoding.backends.protocol import DecoderState, can_burst
from monoblock.decoding.evaluation_mode import evaluation_mode
from monoblock.decoding.prompt import PromptLimits
from monoblock.errors import InputError, with_article
from monoblock.kernels.cpu import onednn
from monoblock.nn.check_model import check_model
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer


class Backend(PromptLimits, Protocol):
    """A way to decode one model: it makes the decoder states, which run the steps."""

    device: torch.device

    @property
    def context(self) -> int | None:
        """The maximum number of tokens in a sequence, or None if there is no limit."""
        ...

    def make_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> DecoderState:
        """Make a decoder state for rows of at most `capacity` tokens.

        If `speculative`, the state can drop rejected tokens (see `RollbackState`).
        """
        ...

    def inference(self) -> AbstractContextManager[object]:
        """Return the context manager in which every pass runs: no gradients, evaluation mode."""
        ...

    def renew(self, state: DecoderState | None) -> tuple[Backend, DecoderState | None] | None:
        """Return a new backend and a new state if the model has changed since the last call, else None.

        The new state continues the rows of `state`.  The first call returns None and remembers the model.
        """
        ...


def choose_backend(
    model: Transformer | Recurrent, *, use_cache: bool = True, optimize: bool = True, tap: Tap | None = None
) -> Backend:
    """Choose the backend for a model; `optimize=False` runs the model itself instead of an inference copy."""
    check_model(model, (Transformer, Recurrent), "Engine")
    if tap is not None and not callable(tap):
        raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
    if isinstance(model, Recurrent):
        if not use_cache:
            raise InputError("an LSTM always decodes from its state; leave out use_cache=False")
        return LSTMBackend(model, tap)
    return TransformerBackend(model, use_cache=use_cache, optimize=optimize, tap=tap)


class LSTMBackend:
    def __init__(self, model: Recurrent, tap: Tap | None = None) -> None:
        self.model, self.device, self.tap = model, model.device, tap
        self.family, self.context = model.config.family, None  # an LSTM has no maximum length
        self.vocab_size = model.config.target_vocab or model.config.vocab
        self.has_encoder = model.encoder is not None
        self.max_source: int | None = None
        self.source_vocab_size = model.config.vocab if self.has_encoder else None

    def make_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> DecoderState:
        if speculative:
            raise InputError(
                "an LSTM cannot take back rejected tokens, as speculative decoding requires; leave out the draft"
            )
        return LSTMDecoderState(self.model, rows_per_prompt, self.tap)

    def inference(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(onednn.disabled_where_slow())
        stack.enter_context(evaluation_mode(self.model))
        return stack

    def renew(self, state: DecoderState | None) -> tuple[Backend, DecoderState | None] | None:
        return None  # every pass runs the model itself


class TransformerBackend:
    def __init__(self, model: Transformer, *, use_cache: bool, optimize: bool, tap: Tap | None) -> None:
        if model.decoder is None or model.head is None or model.head.config.kind != "language_model":
            kind = with_article(model.config.family)
            raise InputError(f"{kind} model without a language-model head generates no text; use a model with one")
        self.device, self.family, self.context = model.device, model.config.family, model.config.context
        self.vocab_size: int = model.config.target_input.vocab  # type: ignore[union-attr]
        self.has_encoder, source = model.encoder is not None, model.config.input
        self.source_vocab_size = self.max_source = None
        if self.has_encoder and isinstance(source, EmbeddingConfig):
            self.source_vocab_size = source.vocab
            self.max_source = source.context if isinstance(source.positions, Learned) else None
        self.original, self.use_cache, self.optimize, self.tap = model, use_cache, optimize, tap
        self.dtype = next((weight.dtype for weight in model.parameters()), None)
        self.version: ModelVersion | None = None
        self.prepared = prepare(model) if optimize and use_cache and tap is None else None
        self.model = model if self.prepared is None else self.prepared.model
        # User-defined modules may do what inference mode forbids, such as FSDP's in-place all-gather.
        self.is_plain = self.prepared is not None or reason_to_run_as_is(model) is None

    def make_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> DecoderState:
        if not self.use_cache:
            return UncachedDecoderState(self.model, capacity, rows_per_prompt, self.tap)
        if self.prepared is not None and supports_cuda_graph(self.model):
            prepared = self.prepared
            make_state = prepared.make_speculative_state if speculative else prepared.make_graph_state
            return make_state(capacity, rows_per_prompt, prefill_chunk)
        if self.prepared is not None and not speculative:
            operators = self.prepared.get_search_operators() if rows_per_prompt > 1 else None
            if operators is not None:
                return CpuSearchDecoderState(self.model, capacity, rows_per_prompt, prefill_chunk, operators=operators)
        return CachedDecoderState(self.model, capacity, rows_per_prompt, prefill_chunk, self.tap)

    def inference(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.is_plain))  # left by a draft that needs no_grad
        stack.enter_context(torch.no_grad())
        stack.enter_context(onednn.disabled_where_slow())
        if self.prepared is None:
            stack.enter_context(evaluation_mode(self.model))
        return stack

    def renew(self, state: DecoderState | None) -> tuple[Backend, DecoderState | None] | None:
        if self.prepared is None:
            return None  # every pass runs the model itself
        if self.version is None:
            self.version = ModelVersion(self.original)
        if not self.version.has_changed():
            return None
        options = {"use_cache": self.use_cache, "optimize": self.optimize}
        backend = TransformerBackend(self.original, **options, tap=self.tap)
        backend.renew(None)
        if isinstance(state, CachedDecoderState) and state.model is not backend.model:
            state = backend._continue_rows(state, self.dtype)
        return backend, state

    def _continue_rows(self, state: CachedDecoderState, dtype: torch.dtype | None) -> DecoderState:
        """Return a new state of this backend with the rows of `state`, whose model had weights of this dtype."""
        shape = (state.capacity, state.rows_per_prompt, state.prefill_chunk)
        new = self.make_state(*shape, speculative=not can_burst(state))
        assert isinstance(new, CachedDecoderState)

        def convert(t: Tensor) -> Tensor:
            return t.to(self.device, self.dtype if t.dtype == dtype else t.dtype, copy=True)

        with self.inference():
            new.continue_rows(state, convert)
        return new
