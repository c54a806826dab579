"""Beam search on a GPU: one CUDA graph runs a whole step of all searches, and several steps run before Python looks.

`SearchBuffers` holds the cache and the beams of a batch in fixed shapes, with one recorded step for each number of
visible positions.  Its sizes are rounded up, so that later batches of other sizes can reuse the recordings; the rows
that a batch does not need stay idle.  `RecordedSearch` runs one batch of searches in such buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.backends.search.device_search import DeviceSearch, SearchShape
from monoblock.inference.backends.search.record import Recording, record
from monoblock.inference.beam import BeamSearch, num_candidates
from monoblock.inference.prompt import Prompt
from monoblock.nn.kv_cache.beam_cache import BeamCache
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.transformer import Transformer

MAX_STEPS = 4  # the most steps that run before Python reads which searches are done
CAPACITY_MULTIPLE = 32
SOURCE_MULTIPLE = 16
MIN_VISIBLE = 16  # the fewest positions of a recorded step
MAX_IDLE_BUFFERS = 4
NAN_LOGITS = "the logits of this model are NaN; its weights are damaged, or too large for the dtype"


class BufferKey(NamedTuple):
    """The sizes of `SearchBuffers`, and what their recorded steps depend on."""

    searches: int
    beams: int
    source_length: int  # 0 without an encoder
    capacity: int  # the most tokens of a row, prompt included
    candidates: int
    is_constrained: bool

    @classmethod
    def for_batch(cls, prompts: Sequence[Prompt], searches: Sequence[BeamSearch]) -> BufferKey:
        """Return the sizes for a batch, rounded up."""
        longest = max(
            len(prompt.ids) + search.settings.max_new_tokens for prompt, search in zip(prompts, searches, strict=True)
        )
        source = max(len(prompt.source or ()) for prompt in prompts)
        return cls(
            searches=round_up_searches(len(prompts)),
            beams=searches[0].size,
            source_length=_round_up(source, SOURCE_MULTIPLE),
            capacity=_round_up(longest, CAPACITY_MULTIPLE),
            candidates=num_candidates(list(searches)),
            is_constrained=any(_is_constrained(search) for search in searches),
        )


def _is_constrained(search: BeamSearch) -> bool:
    settings = search.settings
    return bool(settings.suppress_tokens or settings.begin_suppress_tokens or settings.min_new_tokens)


def round_up_searches(count: int) -> int:
    """Round a number up to a power of two, or to one and a half times a power of two."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class SearchBuffers:
    """The cache and the beams of a batch of searches, and the recorded steps that advance them."""

    def __init__(self, model: Transformer, key: BufferKey) -> None:
        assert model.decoder is not None
        self.model, self.key = model, key
        vocab = model.config.target_input.vocab  # type: ignore[union-attr]
        shape = SearchShape(key.searches, key.beams, key.capacity, vocab, key.candidates, key.is_constrained)
        self.search = DeviceSearch(shape, model.device)
        self.cache = BeamCache(
            model.decoder.config,
            searches=key.searches,
            beams=key.beams,
            max_tokens=key.capacity,
            source_length=key.source_length,
            device=model.device,
        )
        self.recordings: dict[int, Recording] = {}  # by the number of visible positions

    def begin(self, prompts: Cache, lengths: Tensor, logits: Tensor, searches: Sequence[BeamSearch]) -> None:
        """Begin searches with cached prompts and the logits (prompts, V) after them, and choose their first tokens."""
        self.cache.copy_prompts(prompts, lengths)
        self.search.begin(searches)
        first = logits.new_zeros(self.key.searches, logits.shape[-1])
        first[: len(logits)] = logits
        self._advance(first[:, None].expand(-1, self.key.beams, -1))

    def run(self, count: int, length: int) -> None:
        """Run `count` steps; `length` is the number of tokens of the longest row before them."""
        visible = self._visible_positions(length + count)
        recording = self.recordings.get(visible)
        if recording is None:
            recording = self.recordings[visible] = self._record(visible)
        for _ in range(count):
            recording.replay()

    def _visible_positions(self, length: int) -> int:
        visible = MIN_VISIBLE
        while visible < length:
            visible *= 2
        return min(visible, self.key.capacity)

    def _record(self, visible: int) -> Recording:
        """Record a step that sees this many positions.

        Meanwhile all searches are done, so that the steps run by `record` do not advance them.
        """

        def step() -> None:
            self.cache.num_positions = visible
            self._step()

        done = self.search.done.clone()
        self.search.done.fill_(True)
        recording = record(step, self.model.device)
        self.search.done.copy_(done)
        return recording

    def _step(self) -> None:
        """Run the newest token of every beam, choose the next ones, and let each beam continue its origin."""
        cache, tokens = self.cache, self.search.newest
        positions = cache.lengths[:, None].expand_as(tokens)
        if self.model.encoder is None:
            logits = self.model(tokens, positions=positions, cache=cache)
        else:
            logits = self.model(None, tokens, positions=positions, cache=cache)
        cache.lengths.add_(~self.search.done)
        self._advance(logits)

    def _advance(self, logits: Tensor) -> None:
        self.search.advance(logits)
        self.cache.reorder_beams(self.search.origins)


class BufferPool:
    """Buffers of finished batches, kept with their recordings for the next batch of the same sizes.

    At most MAX_IDLE_BUFFERS are kept; those used longest ago are freed first.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.idle, self.lock = model, list[SearchBuffers](), threading.Lock()

    def take(self, key: BufferKey) -> SearchBuffers:
        """Return idle buffers of these sizes, or new ones."""
        with self.lock:
            found = next((buffers for buffers in self.idle if buffers.key == key), None)
            if found is not None:
                self.idle.remove(found)
        return found if found is not None else SearchBuffers(self.model, key)

    def give_back(self, buffers: SearchBuffers) -> None:
        with self.lock:
            self.idle = [*self.idle, buffers][-MAX_IDLE_BUFFERS:]


class RecordedSearch:
    """A batch of beam searches that run in `SearchBuffers` until all of them are done."""

    def __init__(
        self,
        buffers: SearchBuffers,
        prompts: Sequence[Prompt],
        searches: Sequence[BeamSearch],
        run_prompts: Callable[[Cache, Sequence[Prompt]], Tensor],
    ) -> None:
        self.buffers, self.rows = buffers, list(range(len(searches)))  # the row of each search
        self.num_tokens = 1  # the number of new tokens of an unfinished search
        self.max_new_tokens = max(search.settings.max_new_tokens for search in searches)
        lengths = [len(prompt.ids) for prompt in prompts]
        self.prompt_length = max(lengths)
        cache = buffers.model.make_cache(len(prompts), self.prompt_length, chunk=self.prompt_length)
        logits = run_prompts(cache, prompts)
        buffers.begin(cache, torch.tensor(lengths, device=logits.device), logits, searches)

    def step(self, searches: Sequence[BeamSearch]) -> list[int]:
        """Run some steps and return the indices of the searches that ended with them."""
        count = min(MAX_STEPS, self.max_new_tokens - self.num_tokens)
        if count > 0:
            self.buffers.run(count, self.prompt_length + self.num_tokens - 1)
            self.num_tokens += count
        device = self.buffers.search
        is_damaged = device.scores.isnan().any(-1)
        flags = torch.stack((device.done, is_damaged)).tolist()
        if any(flags[1][row] for row in self.rows):
            raise InputError(NAN_LOGITS)
        ended = [
            index
            for index, (search, row) in enumerate(zip(searches, self.rows, strict=True))
            if flags[0][row] and not search.is_done
        ]
        for search in searches:
            search.length = search.length if search.is_done else self.num_tokens
        if ended:
            done = [searches[index] for index in ended]
            count = max(search.settings.num_return_sequences for search in done)
            device.copy_finished([self.rows[index] for index in ended], done, count)
            for search in done:
                search.groups[0].is_done = True
        return ended

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only the searches with these indices; the others stop."""
        kept = [self.rows[index] for index in indices]
        dropped = sorted(set(self.rows) - set(kept))
        self.buffers.search.done[torch.tensor(dropped, dtype=torch.long, device=self.buffers.model.device)] = True
        self.rows = kept

    def end(self, searches: Sequence[BeamSearch], capacity: int) -> Cache:
        """Copy the beams to their `BeamSearch` objects, and return a cache with one row for each beam."""
        rows, device = self.rows, self.buffers.search
        unfinished = [index for index, search in enumerate(searches) if not search.is_done]
        if unfinished:
            device.copy_finished([rows[index] for index in unfinished], [searches[index] for index in unfinished])
        device.copy_running(rows, searches)
        cache = self.buffers.model.make_cache(len(rows) * self.buffers.key.beams, capacity, chunk=capacity)
        self.buffers.cache.copy_beams_to(cache, torch.tensor(rows, device=self.buffers.model.device))
        return cache
