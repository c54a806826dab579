"""Beam search on a CPU: one C++ operator runs whole steps of all searches and keeps their beams until the search ends.

Beams change rows at every step.  The operator does not move their keys and values: it leaves them in the row where they
were written and records which row that is.  `end_search` moves them to the rows of their beams and copies the beams
back to `BeamSearch`; every other method that reads the cache or the beams calls it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import Learned, Sinusoid
from monoblock.inference.backends.cpu_search_operators import SearchOperators
from monoblock.inference.backends.cpu_step import MAX_TOKENS
from monoblock.inference.backends.eager import CachedDecoderState, pad_sources
from monoblock.inference.beam import BeamHypothesis, BeamSearch
from monoblock.inference.prompt import Prompt, pad_right
from monoblock.inference.settings import LENGTH_OFFSETS
from monoblock.nn.attention import Attention
from monoblock.nn.embedding import Embedding
from monoblock.nn.inputs.input_positions import memory_positions, token_positions
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.positions import sinusoid
from monoblock.nn.token_positions import TokenPositions
from monoblock.nn.transformer import Transformer


class CpuSearchDecoderState(CachedDecoderState):
    """A decoder state with a key/value cache that can run the steps of a beam search in a C++ operator."""

    capabilities = frozenset({"search", "rollback"})
    is_closed = False  # new prompts can be added at every step

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        rows_per_prompt: int,
        prefill_chunk: int | None = None,
        *,
        operators: SearchOperators,
    ) -> None:
        super().__init__(model, capacity, rows_per_prompt, prefill_chunk)
        self.operators = operators
        self.search: Any = None  # the operator's beams while it searches
        self.embeds_tokens = False  # whether the operator embeds tokens itself
        self.searches: list[BeamSearch] = []  # the searches that the operator runs
        self.first_tokens: list[int] | None = None  # the prompt's token of each search, before the first step

    def begin_search(self, prompts: Sequence[Prompt]) -> bool:
        """Add rows for prompts of one token each; the first `step_search` runs these tokens.

        Return False if the C++ operator does not support the prompts.
        """
        rows = len(prompts) * self.rows_per_prompt
        if rows <= MAX_TOKENS or self.cache is not None or any(len(prompt.ids) != 1 for prompt in prompts):
            return False
        cache = self.model.make_cache(rows, self.capacity)
        cache.rows_per_source = self.rows_per_prompt
        if not _is_sequential(cache):
            return False
        self.cache = cache
        encoded = self._encode_sources(prompts)
        assert self.model.decoder is not None
        if encoded is not None:
            memory_positions(*encoded, cache, self.model.config.width)
            for block, cross in zip(self.model.decoder.blocks, cache.cross_layers, strict=True):
                if cross is not None and block.cross is not None:
                    cross.fill(*_source_keys_values(block.cross, encoded[0]))
        self._allocate_cache(cache, rows)
        self.first_tokens = [prompt.ids[0] for prompt in prompts]
        return True

    def _allocate_cache(self, cache: Cache, rows: int) -> None:
        """Allocate each layer's cache in memory of the C++ operator, so that the keys of one step are contiguous."""
        assert self.model.decoder is not None
        views: list[tuple[Any, str, tuple[int, ...]]] = []
        for block, layer in zip(self.model.decoder.blocks, cache.layers, strict=True):
            config, width = block.config.attention, block.config.width
            for name, size in (("keys", config.key_size(width)), ("values", config.value_size(width))):
                views.append((layer, name, (layer.capacity + 1, rows, config.num_kv_heads, size)))
        sizes = [math.prod(shape) for *_, shape in views]
        memory = self.operators.search_model.cache_memory(sum(sizes))[: sum(sizes)].split(sizes)
        for (layer, name, shape), part in zip(views, memory, strict=True):
            setattr(layer, name, part.view(shape).permute(1, 2, 0, 3))

    def _encode_sources(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor | None] | None:
        """Encode the prompts' sources; return the encoder's output (B, S, D) and the mask (B, S) of valid tokens.

        The mask is None if no source is padded.  The result is None if the model has no encoder.  The encoder operator,
        if there is one, takes the sources concatenated, without padding.
        """
        if self.operators.encoder is None:
            padded = pad_sources(self.model, prompts)
            return None if padded is None else (self.model.encode(*padded), padded[1])
        sources = [prompt.source or () for prompt in prompts]
        _, mask = pad_right(sources, self.device)
        ids = torch.tensor([token for source in sources for token in source])[None]
        lengths = [len(source) for source in sources]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        x = self.model._embed(ids, token_positions(ids, None, positions, None, None, None), None, None, side="input")
        out = torch.ops.monoblock.encode(self.operators.encoder, x[0].contiguous(), torch.tensor(lengths))
        if mask is None:
            return out.view(len(prompts), lengths[0], -1), None
        memory = out.new_zeros(*mask.shape, out.shape[-1])
        memory[mask] = out
        return memory, mask

    def step_search(self, searches: list[BeamSearch], suppressed: Sequence[int]) -> list[int] | None:
        """Advance the unfinished searches by one token, without the tokens in `suppressed`.

        Return the indices of the searches that end with this step, or None if the C++ operator does not support them.
        """
        if self.search is None and not self._start_search(searches):
            return None
        x = None if self.embeds_tokens else self._embed_tokens(*self.search.next_inputs())
        done: list[int] = self.search.step(x, suppressed)
        for search in searches:
            search.length += not search.is_done
        for index in done:
            _copy_beams(self.search, index, searches[index])
            searches[index].groups[0].is_done = True
        return done

    def _start_search(self, searches: list[BeamSearch]) -> bool:
        """Pass the cache and the beams to the C++ operator; return False if it does not support them."""
        cache = self.cache
        if (
            cache is None
            or cache.batch <= MAX_TOKENS
            or cache.max_length >= cache.capacity
            or not _is_sequential(cache)
        ):
            return False
        sources: list[Any] = [layer for layer in cache.cross_layers if layer is not None]
        memory, settings = cache.memory_positions, searches[0].settings
        embedding, table = self.operators.embedding, None
        if embedding is not None:
            table = _position_table(embedding, cache.capacity, self.model.config.width)
        self.embeds_tokens = embedding is not None and (table is None or len(table) == cache.capacity)
        self.search = torch.classes.monoblock.BeamSearchBatch(
            model=self.operators.search_model,
            keys=[layer.keys for layer in cache.layers],
            values=[layer.values for layer in cache.layers],
            source_keys=[layer.keys for layer in sources],
            source_values=[layer.values for layer in sources],
            source_mask=None if memory is None or memory.valid is None else memory.valid.contiguous(),
            lengths=cache.lengths,
            position_table=table if self.embeds_tokens else None,
            beams=self.rows_per_prompt,
            max_new_tokens=settings.max_new_tokens,
            early_stopping=str(settings.early_stopping).lower(),
            eos_tokens=list(settings.eos_token_id),
            length_penalty=float(settings.length_penalty),
            length_offset=float(LENGTH_OFFSETS[settings.length_penalty_form]),
        )
        first_tokens, self.first_tokens = self.first_tokens or [0] * len(searches), None
        for first_token, search in zip(first_tokens, searches, strict=True):
            self._add_search(first_token, search)
        self.searches = searches
        return True

    def _add_search(self, first_token: int, search: BeamSearch) -> None:
        running, finished = search.groups[0].running, search.groups[0].finished
        self.search.add(
            first_token=first_token,
            scores=[hypothesis.score for hypothesis in running],
            running=torch.tensor([hypothesis.tokens for hypothesis in running], dtype=torch.long),
            finished_scores=[hypothesis.score for hypothesis in finished],
            finished=[torch.tensor(hypothesis.tokens, dtype=torch.long) for hypothesis in finished],
            done=search.is_done,
        )

    def _embed_tokens(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Embed tokens (rows,) at positions `lengths` (rows,); return (rows, D)."""
        positions = TokenPositions(lengths[:, None])
        return self.model._embed(tokens[:, None], positions, None, None, side="target")[:, 0].contiguous()

    # -- methods that read the cache and the beams ----------------------------------------------------------------

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        self.end_search()
        return super().prefill(prompts)

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        self.end_search()
        return super().score_tokens(tokens, active)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.end_search()
        super().reorder(rows, sources)

    def _give_cache(self) -> Cache | None:
        self.end_search()
        return self.cache

    def end_search(self) -> None:
        """End the search in C++: move keys and values to the rows of their beams, copy the beams to `BeamSearch`."""
        cache, search = self.cache, self.search
        if cache is None or search is None:
            return
        self.search = None
        for number, beam_search in enumerate(self.searches):
            if not beam_search.is_done:
                _copy_beams(search, number, beam_search)
        cache.advance(search.lengths() - cache.lengths)
        rows, column = search.cache_rows(), torch.arange(cache.capacity)
        unwritten = (column >= cache.lengths[:, None])[:, None, :, None]
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                assert tensor is not None
                moved = tensor.transpose(1, 2)[rows, column].transpose(1, 2)
                tensor[:, :, : cache.capacity] = moved.masked_fill(unwritten, 0)
        for index in cache.index_by_capacity.values():
            index.record_sequential_tokens(cache.lengths)
        cache.max_written = torch.maximum(cache.max_written, cache.lengths)


def _is_sequential(cache: Cache) -> bool:
    """Return whether the cache stores the tokens of each row in the order of their positions."""
    return not cache.is_static and all(index.is_sequential for index in cache.index_by_capacity.values())


def _position_table(embedding: Embedding, count: int, width: int) -> Tensor | None:
    """Return the position vectors (count, D) that an embedding adds at positions 0 to `count` - 1.

    There are fewer if the embedding's own table is shorter.  Return None if the embedding adds no position vectors.
    """
    positions = embedding.config.positions
    if isinstance(positions, Sinusoid):
        return sinusoid(torch.arange(count), width, positions)
    if isinstance(positions, Learned) and embedding.position is not None:
        return embedding.position.weight.detach()[positions.offset :][:count]
    return None


def _source_keys_values(attention: Attention, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-attention keys and values (B, G, S, K) of encoded sources (B, S, D)."""
    groups = attention.config.num_kv_heads
    keys = attention.split_heads(attention.key(memory), groups, attention.key_norm)
    return keys, attention.split_heads(attention.value(memory), groups)


def _copy_beams(batch: Any, index: int, search: BeamSearch) -> None:
    """Copy the hypotheses of the search with this index from `batch`, the C++ object, to a BeamSearch."""
    group = search.groups[0]
    group.running, group.finished = (_make_hypotheses(*beams) for beams in batch.hypotheses(index))


def _make_hypotheses(scores: list[float], tokens: list[Tensor]) -> list[BeamHypothesis]:
    return [BeamHypothesis(tuple(row.tolist()), score) for score, row in zip(scores, tokens, strict=True)]
