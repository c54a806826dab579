"""Record a decoding step as a CUDA graph and replay it, since launching its many small kernels one by one is slow.

The cache has one shape for all steps (`Cache.make_static`); tokens and lengths are in fixed buffers.  A burst replays
several steps, including the choice of each token, before Python looks at the result.  Prompts whose shape is repeated
are recorded too (recorded_prompts.py).  A beam search has recorded steps of its own (search/cuda_search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monoblock.inference.backends.eager import CachedDecoderState
from monoblock.inference.backends.protocol import ChooseTokens
from monoblock.inference.backends.recorded_prompts import (
    MAX_CACHE_BYTES,
    PromptShape,
    RecordedPrompts,
    can_record_prompts,
    prompts_have_one_length,
)
from monoblock.inference.backends.search.cuda_search import BufferKey, BufferPool, RecordedSearch
from monoblock.inference.backends.search.record import Recording, record
from monoblock.inference.beam import BeamSearch
from monoblock.inference.prompt import Prompt
from monoblock.inference.supported_models import SUPPORTED, unsupported_field
from monoblock.nn.kv_cache.beam_cache import MAX_BEAMS
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.transformer import Transformer

CAPACITY_MULTIPLE = 64


def supports_cuda_graph(model: Transformer) -> bool:
    """Return whether the steps of a model can be recorded: it is on a GPU, and SUPPORTED allows all its blocks."""
    blocks = () if model.decoder is None else dict.fromkeys(model.decoder.config.layers())
    return model.device.type == "cuda" and all(unsupported_field(block, SUPPORTED) is None for block in blocks)


class CudaGraphDecoderState(CachedDecoderState):
    """A decoder state that replays a recorded CUDA graph at every step.

    When all rows are finished, it calls `give_back` with itself, so that later prompts can reuse the recording.
    """

    capabilities = frozenset({"burst", "search"})

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        rows_per_prompt: int = 1,
        prefill_chunk: int | None = None,
        give_back: Callable[[CudaGraphDecoderState], None] | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(model, _round_up(capacity), rows_per_prompt, prefill_chunk)
        self.give_back = give_back  # called with this state when all rows are finished
        self.pool = pool if pool is not None else BufferPool(model)  # of the buffers of beam searches
        self.prompts: Sequence[Prompt] | None = None  # of a search that begins with the next step
        self.search: RecordedSearch | None = None  # while a search runs
        self.searches: list[BeamSearch] = []  # those of `search`
        self.can_record_prompts = rows_per_prompt == 1 and prefill_chunk is None and can_record_prompts(model)
        self.last_prompts: PromptShape | None = None  # of the last call, if a pass over them can be recorded
        self.recorded_prompts: RecordedPrompts | None = None
        self.graph: Recording | None = None
        self.choose: ChooseTokens | None = None
        self.key: object = None  # what the recorded choice of tokens depends on
        self.is_idle = False

    def fits(self, capacity: int, rows_per_prompt: int, prefill_chunk: int | None) -> bool:
        """Return whether this idle state can be reused for a batch of these sizes."""
        sizes = (self.capacity, self.rows_per_prompt, self.prefill_chunk)
        return sizes == (_round_up(capacity), rows_per_prompt, prefill_chunk)

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        self.end_search()
        recorded = self.cache if self.is_idle and self.graph is not None else None
        if self.is_idle:
            self.cache = None  # its rows are finished
        else:
            self._discard_graph()
        is_repeated = self._note_shape(prompts)
        logits = self._replay_prompts(prompts, recorded) if recorded is not None and is_repeated else None
        if logits is None:
            logits = super().prefill(prompts)
            if recorded is not None and self.cache is not None and recorded.copy_from(self.cache):
                self.cache = recorded  # the shapes are the same, so the recording is still valid
            elif recorded is not None:
                self.graph = None
        self.is_idle = False
        return logits

    def _note_shape(self, prompts: Sequence[Prompt]) -> bool:
        """Keep the shape of these prompts; return whether they have that of the last ones and can be recorded."""
        shape, last = None, self.last_prompts
        if self.can_record_prompts and prompts_have_one_length(prompts):
            shape = PromptShape(len(prompts), len(prompts[0].ids), self.capacity, self._cache_chunk)
        self.last_prompts = shape
        return shape is not None and shape == last

    def _replay_prompts(self, prompts: Sequence[Prompt], recorded: Cache) -> Tensor | None:
        """Run the recorded pass over prompts of the last shape and copy its cache into that of the recorded steps.

        Return None, having changed nothing, if the shapes of the caches differ or a copy of the cache is too large.
        """
        assert self.last_prompts is not None
        if recorded.batch != self.last_prompts.rows or recorded.nbytes > MAX_CACHE_BYTES:
            return None
        if self.recorded_prompts is None or self.recorded_prompts.shape != self.last_prompts:
            self.recorded_prompts = None  # frees its memory first
            try:
                self.recorded_prompts = RecordedPrompts(self.model, self.last_prompts)
            except RuntimeError:  # a pass that cannot be recorded, or too little memory
                self.can_record_prompts = False
                return None
        logits = self.recorded_prompts.run(prompts)
        if not recorded.copy_from(self.recorded_prompts.cache):
            return None
        self.cache = recorded
        return logits

    def release(self) -> None:
        self.is_idle, self.prompts = True, None
        self._give_back_search()
        if self.give_back is not None:
            self.give_back(self)

    def continue_rows(self, other: CachedDecoderState, convert: Callable[[Tensor], Tensor]) -> None:
        self.graph, self.is_idle = None, False
        super().continue_rows(other, convert)

    def _give_cache(self) -> Cache | None:
        self.end_search()
        self._discard_graph()
        return self.cache

    def _discard_graph(self) -> None:
        """Drop the recorded step and return to a cache whose shape may change."""
        self.graph = None
        if self.cache is not None and self.cache.is_static:
            self.cache.make_dynamic()

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        self._record_if_needed(None, None)
        assert self.graph is not None
        self._set_inputs(tokens, active)
        self.graph.replay()
        return self.logits

    def burst(
        self,
        tokens: Tensor,
        count: int,
        uniforms: Tensor | None,
        choose: ChooseTokens,
        key: object,
        active: Tensor | None = None,
    ) -> Tensor:
        self._record_if_needed(choose, key)
        assert self.graph is not None
        self._set_inputs(tokens, active)
        chosen = torch.empty(len(tokens), count, dtype=torch.long, device=self.device)
        for step in range(count):
            if uniforms is not None:
                self.uniforms.copy_(uniforms[:, step])
            self.graph.replay()
            chosen[:, step] = self.tokens
        return chosen

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        if self.search is not None and sources is not None:
            kept = sources.tolist()
            self.search.keep(kept)
            self.searches = [self.searches[index] for index in kept]
            return
        self.end_search()
        self._discard_graph()
        super().reorder(rows, sources)

    def _set_inputs(self, tokens: Tensor, active: Tensor | None) -> None:
        self.tokens.copy_(tokens)
        if active is None:
            self.active.fill_(1)
        else:
            self.active.copy_(active)

    def _record_if_needed(self, choose: ChooseTokens | None, key: object) -> None:
        if self.graph is not None and self.key == key:
            return
        assert self.cache is not None
        rows = self.cache.batch
        self.cache.make_static()
        self.graph, self.choose, self.key = None, choose, key
        self.tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.active = torch.ones(rows, dtype=torch.long, device=self.device)
        self.uniforms = torch.zeros(rows, dtype=torch.double, device=self.device)
        lengths = self.cache.lengths.clone()
        self.graph = self._record()
        self.cache.lengths.copy_(lengths)

    def _record(self) -> Recording:
        return record(self._run_once, self.device)

    def _run_once(self) -> None:
        """Run the step to be recorded: a pass of the model, the new lengths and, in a burst, the choice of tokens."""
        assert self.cache is not None
        self.logits = self.score_tokens(self.tokens[:, None])[:, -1]
        self.cache.lengths.add_(self.active)
        if self.choose is not None:
            self.tokens.copy_(self.choose(self.logits, self.uniforms))

    # -- beam search ----------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether a search runs: no rows can be added before it ends."""
        return self.search is not None

    def begin_search(self, prompts: Sequence[Prompt]) -> bool:
        is_empty = self.search is None and (self.is_idle or self.cache is None)
        if not is_empty or self.rows_per_prompt > MAX_BEAMS:
            return False
        self.prompts = prompts
        return True

    def step_search(self, searches: list[BeamSearch], suppressed: Sequence[int]) -> list[int] | None:
        """Run several steps; `suppressed` is not used, since the settings of the searches say the same of all steps."""
        if self.search is None and self.prompts is None:
            return None
        try:
            if self.search is None:
                prompts, self.prompts = self.prompts or (), None
                buffers = self.pool.take(BufferKey.for_batch(prompts, searches))
                self.search = RecordedSearch(buffers, prompts, searches, self._run_prompts)
            self.searches = searches
            return self.search.step(searches)
        except BaseException:
            self.search = None  # its buffers may be damaged
            raise

    def end_search(self) -> None:
        self.prompts = None
        if self.search is None:
            return
        self.cache, self.graph, self.is_idle = self.search.end(self.searches, self.capacity), None, False
        self._give_back_search()

    def _give_back_search(self) -> None:
        if self.search is not None:
            self.pool.give_back(self.search.buffers)
        self.search, self.searches = None, []


def _round_up(capacity: int) -> int:
    return -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
