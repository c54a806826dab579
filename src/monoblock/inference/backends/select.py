"""Choose the backend that decodes a model.

| backend    | when                                                                                             |
|------------|--------------------------------------------------------------------------------------------------|
| uncached   | use_cache=False                                                                                  |
| cuda_graph | an optimized model on a GPU, blocks in its allow-list                                            |
| cpu_search | an optimized model, several rows per prompt on a CPU with a compiler, blocks in its allow-list   |
| cached     | otherwise: the modules of the model, or of the fast copy of an optimized model                   |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.positions import Learned
from monoblock.errors import InputError, with_article
from monoblock.inference.backends.cpu_search import CpuSearchDecoderState
from monoblock.inference.backends.cuda_graph import supports_cuda_graph
from monoblock.inference.backends.eager import CachedDecoderState, UncachedDecoderState
from monoblock.inference.backends.prepared_model import GenerativeModel, PreparedModel
from monoblock.inference.backends.protocol import DecoderState
from monoblock.inference.evaluation_mode import evaluation_mode
from monoblock.inference.prompt import PromptLimits
from monoblock.kernels.cpu import onednn
from monoblock.nn.check_model import check_model
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


def choose_backend(model: GenerativeModel, *, use_cache: bool = True, tap: Tap | None = None) -> Backend:
    """Choose the backend for a model."""
    if not isinstance(model, PreparedModel):
        check_model(model, Transformer, "Engine", also="what mb.optimize(model) returns")
    if tap is not None and not callable(tap):
        raise InputError(f"tap={tap!r:.60} is not valid; write a function (name, activation) -> activation or None")
    if isinstance(model, PreparedModel) and (tap is not None or not use_cache):
        option = "taps" if use_cache else "use_cache=False"
        raise InputError(f"an optimized model has no {option}; call the model itself, which runs its modules")
    return TransformerBackend(model, use_cache=use_cache, tap=tap)


class TransformerBackend:
    def __init__(self, model: Transformer | PreparedModel, *, use_cache: bool, tap: Tap | None) -> None:
        self.fast = model if isinstance(model, PreparedModel) else None
        plain = model if isinstance(model, Transformer) else model.plain
        if plain.decoder is None or plain.head is None or plain.head.config.kind != "language_model":
            kind = with_article(model.config.family)
            raise InputError(f"{kind} model without a language-model head generates no text; use a model with one")
        self.device, self.family, self.context = plain.device, plain.config.family, plain.config.context
        self.vocab_size: int = plain.config.target_input.vocab  # type: ignore[union-attr]
        self.has_encoder, source = plain.encoder is not None, plain.config.input
        self.source_vocab_size = self.max_source = None
        if self.has_encoder and isinstance(source, EmbeddingConfig):
            self.source_vocab_size = source.vocab
            self.max_source = source.context if isinstance(source.positions, Learned) else None
        self.use_cache, self.tap = use_cache, tap
        self.model = plain if self.fast is None else self.fast.model

    def make_state(
        self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None, *, speculative: bool
    ) -> DecoderState:
        shape = (capacity, rows_per_prompt, prefill_chunk)
        if not self.use_cache:
            return UncachedDecoderState(self.model, capacity, rows_per_prompt, self.tap)
        if self.fast is not None and supports_cuda_graph(self.model):
            return self.fast.make_graph_state(*shape, speculative=speculative)
        operators = None
        if self.fast is not None and not speculative and rows_per_prompt > 1:
            operators = self.fast.search_operators()
        if operators is not None:
            return CpuSearchDecoderState(self.model, *shape, operators=operators)
        return CachedDecoderState(self.model, *shape, self.tap)

    @contextmanager
    def inference(self) -> Iterator[None]:
        # Modules of users may do what inference mode forbids, such as FSDP's in-place all-gather.
        mode = nullcontext() if self.fast is not None else evaluation_mode(self.model)
        with torch.inference_mode(self.fast is not None), torch.no_grad(), onednn.disabled_where_slow(), mode:
            yield
