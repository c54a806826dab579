"""The plain backends: one pass of the model per step.

`CachedDecoderState` runs each new token once against a key/value cache.  `UncachedDecoderState` runs the whole sequence
again at every step; it is the reference for all other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monoblock.inference.prompt import Prompt, pad_right
from monoblock.nn.kv_cache.cache import DEFAULT_CHUNK, Cache
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

Sources = tuple[Tensor, Tensor | None]  # ids (B, S) padded on the right, and the mask (B, S) of valid tokens or None


def pad_sources(model: Transformer, prompts: Sequence[Prompt]) -> Sources | None:
    """Pad the sources of the prompts to one length; return None if the model has no encoder."""
    if model.encoder is None:
        return None
    return pad_right([prompt.source or () for prompt in prompts], model.device)


class CachedDecoderState:
    """A decoder state with a key/value cache; the `rows_per_prompt` rows of a prompt share its encoded source."""

    capabilities: frozenset[str] = frozenset({"rollback"})

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        rows_per_prompt: int = 1,
        prefill_chunk: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.model, self.capacity, self.rows_per_prompt, self.tap = model, capacity, rows_per_prompt, tap
        self.prefill_chunk = prefill_chunk  # maximum number of prompt tokens in one pass; None for all
        self.device = model.device
        self.cache: Cache | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        cache = self.model.make_cache(len(prompts), self.capacity, chunk=self._cache_chunk)
        logits = self._run_prompts(cache, prompts)
        cache.repeat_interleave(self.rows_per_prompt)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append_rows(cache)
        return logits.repeat_interleave(self.rows_per_prompt, 0) if self.rows_per_prompt > 1 else logits

    @property
    def _cache_chunk(self) -> int:
        return min(self.capacity, max(self.prefill_chunk or 0, DEFAULT_CHUNK))

    def _run_prompts(self, cache: Cache, prompts: Sequence[Prompt]) -> Tensor:
        ids, mask = pad_right([prompt.ids for prompt in prompts], self.device)
        sources = pad_sources(self.model, prompts)
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=self.device)
        size = self.prefill_chunk or ids.shape[1]
        last_logits: Tensor | None = None
        for start in range(0, ids.shape[1], size):
            chunk = ids[:, start : start + size]
            valid = None if mask is None else mask[:, start : start + size]
            last = (lengths - 1 - start).clamp(0, chunk.shape[1] - 1)[:, None]
            logits = self._run_chunk(cache, chunk, valid, sources, last)[:, 0]
            cache.advance(chunk.shape[1] if valid is None else valid.sum(-1))
            ends_here = ((lengths > start) & (lengths <= start + size))[:, None]
            last_logits = logits if last_logits is None else torch.where(ends_here, logits, last_logits)
        assert last_logits is not None
        return last_logits

    def _run_chunk(
        self, cache: Cache, ids: Tensor, valid: Tensor | None, sources: Sources | None, logits_at: Tensor
    ) -> Tensor:
        if sources is None:
            return self.model(ids, valid, cache=cache, logits_at=logits_at, tap=self.tap)
        source, mask = sources if cache.memory_positions is None else (None, None)  # the first chunk encodes them
        return self.model(source, ids, mask, valid, cache=cache, logits_at=logits_at, tap=self.tap)

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        logits = self.score_tokens(tokens[:, None], active)[:, -1]
        self.commit(1 if active is None else active.long())
        return logits

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        assert self.cache is not None
        valid = None if active is None else active[:, None].expand(tokens.shape)
        if self.model.encoder is None:
            return self.model(tokens, valid, cache=self.cache, tap=self.tap)
        return self.model(None, tokens, target_mask=valid, cache=self.cache, tap=self.tap)

    @property
    def max_droppable(self) -> int:
        assert self.cache is not None
        return self.cache.max_droppable

    def commit(self, counts: int | Tensor) -> None:
        assert self.cache is not None
        self.cache.advance(counts)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        if self.cache is not None:
            self.cache.select(rows, sources)

    def release(self) -> None:
        self.cache = None

    def continue_rows(self, other: CachedDecoderState, convert: Callable[[Tensor], Tensor]) -> None:
        """Take over the rows of another state, which must not be used again; `convert` copies each of its tensors."""
        self.cache = other._give_cache()
        if self.cache is not None:
            self.cache.map_tensors(convert)

    def _give_cache(self) -> Cache | None:
        """Return the cache in the plain layout, which every kind of state can use."""
        return self.cache


class UncachedDecoderState:
    """A decoder state without a cache: every step runs all tokens of every row again."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, model: Transformer, capacity: int, rows_per_prompt: int = 1, tap: Tap | None = None) -> None:
        self.model, self.capacity, self.rows_per_prompt, self.tap = model, capacity, rows_per_prompt, tap
        self.device = model.device
        self.sequences: list[Prompt] = []

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        new = [prompt for prompt in prompts for _ in range(self.rows_per_prompt)]
        self.sequences += new
        return self._run_sequences(new)

    def _run_sequences(self, sequences: Sequence[Prompt]) -> Tensor:
        """Return the logits (rows, V) after the last token of each sequence."""
        ids, mask = pad_right([sequence.ids for sequence in sequences], self.device)
        last = torch.tensor([[len(sequence.ids) - 1] for sequence in sequences], device=self.device)
        sources = pad_sources(self.model, sequences)
        if sources is None:
            return self.model(ids, mask, logits_at=last, tap=self.tap)[:, -1]
        source, source_mask = sources
        return self.model(source, ids, source_mask, mask, logits_at=last, tap=self.tap)[:, -1]

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        goes_on = [True] * len(self.sequences) if active is None else active.tolist()
        rows = zip(self.sequences, tokens.tolist(), goes_on, strict=True)
        self.sequences = [Prompt((*row.ids, token), row.source) if goes else row for row, token, goes in rows]
        return self._run_sequences(self.sequences)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.sequences = [self.sequences[row] for row in rows.tolist()]

    def release(self) -> None:
        self.sequences = []
