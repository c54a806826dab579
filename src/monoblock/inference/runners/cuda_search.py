"""Beam search on a GPU: one CUDA graph runs a whole step of all searches, and several steps run before Python looks.

Searches of one shape that begin together run here instead of in pages.  `SearchBuffers` holds their cache and their
beams in fixed shapes, with one recorded step for each number of visible positions.  Its sizes are rounded up, so that
later batches of other sizes can reuse the recordings; the rows that a batch does not need stay idle.  `RecordedSearch`
runs one batch of searches in such buffers, and `RecordedSearches` one batch after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.beam import (
    BeamHypothesis,
    BeamOptions,
    BeamSearches,
    BeamState,
    advance_beams,
    best_continuations,
    log_softmax,
)
from monoblock.inference.runners.plain import run_texts
from monoblock.inference.runners.record import Replay, record
from monoblock.inference.scheduler import NAN_LOGITS, PLAIN, Prompt, Request
from monoblock.inference.settings import Settings
from monoblock.nn.beam_cache import MAX_BEAMS, BeamCache
from monoblock.nn.cache import Cache
from monoblock.nn.transformer import Transformer

MAX_STEPS = 4  # the most steps that run before Python reads which searches are done
CAPACITY_MULTIPLE = 32
SOURCE_MULTIPLE = 16
MIN_VISIBLE = 16  # the fewest positions of a recorded step; the others are powers of two, or the capacity
MAX_IDLE_BUFFERS = 4
# The settings that searches of a batch share, and those that each of them has for itself; the others must be defaults.
SHARED_SETTINGS = ("num_beams", "suppress_tokens", "begin_suppress_tokens", "priority")
OWN_SETTINGS = (
    *("max_new_tokens", "min_new_tokens", "eos_token_id", "pad_token_id", "seed", "num_return_sequences"),
    *("length_penalty", "length_penalty_form", "early_stopping"),
)
get_shared = attrgetter(*SHARED_SETTINGS)
get_others = attrgetter(*(name for name in vars(Settings()) if name not in (*SHARED_SETTINGS, *OWN_SETTINGS)))
DEFAULTS = get_others(Settings())


def search_shape(request: Request) -> tuple[object, ...] | None:
    """Return what the searches of a batch have in common with this one; None if its steps cannot be recorded."""
    settings = request.settings
    if not 1 < settings.num_beams <= MAX_BEAMS or request.variant != PLAIN or get_others(settings) != DEFAULTS:
        return None
    return settings.eos_token_id if _is_constrained(settings) else None, get_shared(settings)


class BufferKey(NamedTuple):
    """The sizes of `SearchBuffers`, and what their recorded steps depend on."""

    searches: int
    beams: int
    source_length: int  # 0 without an encoder
    capacity: int  # the most tokens of a row, prompt included
    ends: int  # the most end tokens of a search, at least 1
    is_constrained: bool

    @classmethod
    def for_batch(cls, prompts: Sequence[Prompt], searches: BeamSearches) -> BufferKey:
        """Return the sizes for a batch, rounded up."""
        longest = max(len(prompt.ids) + new for prompt, new in zip(prompts, searches.max_new_tokens, strict=True))
        source = max(len(prompt.source or ()) for prompt in prompts)
        return cls(
            searches=round_up_searches(len(prompts)),
            beams=searches.num_beams,
            source_length=_round_up(source, SOURCE_MULTIPLE),
            capacity=_round_up(longest, CAPACITY_MULTIPLE),
            ends=max(1, *(len(settings.eos_token_id) for settings in searches.settings)),
            is_constrained=any(map(_is_constrained, searches.settings)),
        )


def _is_constrained(settings: Settings) -> bool:
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
        self.state: BeamState
        self.options: BeamOptions
        vocab = model.config.target_input.vocab  # type: ignore[union-attr]
        # The tokens that are ruled out in all steps, in the first, and before the minimum length.
        self.ruled_out = torch.zeros(3, 1, vocab, dtype=torch.bool, device=model.device)
        self.min_new_tokens = torch.zeros(key.searches, dtype=torch.long, device=model.device)
        self.cache = BeamCache(
            model.decoder.config,
            searches=key.searches,
            beams=key.beams,
            max_tokens=key.capacity,
            source_length=key.source_length,
            device=model.device,
        )
        self.replays: dict[int, Replay] = {}  # by the number of visible positions

    def begin(self, prompts: Cache, lengths: Tensor, logits: Tensor, searches: BeamSearches) -> None:
        """Begin searches with cached prompts and the logits (prompts, V) after them, and choose their first tokens."""
        self.cache.copy_prompts(prompts, lengths)
        self._copy_searches(searches)
        first = logits.new_zeros(self.key.searches, logits.shape[-1])
        first[: len(logits)] = logits
        self._advance(first[:, None].expand(-1, self.key.beams, -1))

    def _copy_searches(self, searches: BeamSearches) -> None:
        """Copy new searches to the first rows of the buffers; the other rows stay idle."""
        state, options = searches.pack(self.key.capacity)
        if not self.replays:
            self.state = BeamState(*(field.new_empty(self.key.searches, *field.shape[1:]) for field in state))
            self.options = BeamOptions(*(field.new_empty(self.key.searches, *field.shape[1:]) for field in options))
        for buffer, values in zip((*self.state, *self.options), (*state, *options), strict=True):
            buffer.zero_()[: len(searches)] = values
        self.state.done[len(searches) :] = True
        if not self.key.is_constrained:
            return
        least = [settings.min_new_tokens for settings in searches.settings]
        self.min_new_tokens[: len(least)] = torch.tensor(least, device=self.model.device)
        first = searches.settings[0]  # the others have the same tokens to end with or to rule out
        self.ruled_out.zero_()
        ruled_out = first.suppress_tokens, first.begin_suppress_tokens, first.eos_token_id
        for mask, tokens in zip(self.ruled_out, ruled_out, strict=True):
            mask[:, torch.tensor(tokens, dtype=torch.long, device=self.model.device)] = True

    def run(self, count: int, length: int) -> None:
        """Run `count` steps; `length` is the number of tokens of the longest row before them."""
        power = 1 << (length + count - 1).bit_length()
        visible = min(max(MIN_VISIBLE, power), self.key.capacity)
        if visible not in self.replays:
            self.replays[visible] = self._record(visible)
        for _ in range(count):
            self.replays[visible]()

    def _record(self, visible: int) -> Replay:
        """Record a step that sees this many positions.

        Meanwhile all searches are done, so that the steps run by `record` do not advance their caches.
        """

        def step() -> None:
            self.cache.num_positions = visible
            self._step()

        state = BeamState(*(field.clone() for field in self.state))
        self.state.done.fill_(True)
        replay = record(step, self.model.device)
        self._set_state(state)
        return replay

    def _step(self) -> None:
        """Run the newest token of every beam, choose the next ones, and let each beam continue its origin."""
        cache, tokens = self.cache, self.state.newest[:, 0]
        positions = cache.lengths[:, None].expand_as(tokens)
        inputs = (tokens,) if self.model.encoder is None else (None, tokens)
        logits = self.model(*inputs, positions=positions, cache=cache)
        cache.lengths.add_(~self.state.done[:, 0])
        self._advance(logits)

    def _advance(self, logits: Tensor) -> None:
        """Advance the searches, given logits (searches, beams, V)."""
        if self.key.is_constrained:
            lengths = self.state.lengths[:, None]
            always, first, early = self.ruled_out
            ruled_out = always | (first & (lengths == 0)) | (early & (lengths < self.min_new_tokens[:, None]))
            logits = log_softmax(logits).masked_fill(ruled_out[:, None], -math.inf)
        rows = logits.reshape(-1, logits.shape[-1])
        best = best_continuations(rows, self.state, self.options, normalized=self.key.is_constrained)
        self._set_state(advance_beams(self.state, self.options, best))
        self.cache.reorder_beams(self.state.origins[:, 0])

    def _set_state(self, state: BeamState) -> None:
        for buffer, values in zip(self.state, state, strict=True):
            buffer.copy_(values)


class RecordedSearch:
    """A batch of beam searches that run in `SearchBuffers` until all of them are done."""

    def __init__(self, buffers: SearchBuffers, requests: Sequence[Request], searches: BeamSearches) -> None:
        self.buffers, self.searches = buffers, searches
        self.index = {request: index for index, request in enumerate(requests)}
        self.num_tokens = 1  # the number of new tokens of an unfinished search
        self.prompt_length = max(len(request.prompt.ids) for request in requests)
        self._run_prompts([request.prompt for request in requests])

    def _run_prompts(self, prompts: Sequence[Prompt]) -> None:
        model, longest = self.buffers.model, self.prompt_length
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=model.device)
        cache = model.make_cache(len(prompts), longest, chunk=longest)
        logits = run_texts(model, prompts, cache=cache, logits_at=lengths[:, None] - 1)
        is_full = all(len(prompt.ids) == longest for prompt in prompts)
        cache.advance(longest if is_full else lengths)
        self.buffers.begin(cache, lengths, logits[:, 0], self.searches)

    def step(self) -> None:
        """Run some steps, and read which searches are done."""
        count = min(MAX_STEPS, max(self.searches.max_new_tokens) - self.num_tokens)
        if count > 0:
            self.buffers.run(count, self.prompt_length + self.num_tokens - 1)
            self.num_tokens += count
        was_done = self.searches.is_done
        state = BeamState(*(field[: len(was_done)] for field in self.buffers.state))
        self.searches.load(state)
        is_damaged = state.scores.isnan().flatten(1).any(1).tolist()
        if any(damaged and not done for damaged, done in zip(is_damaged, was_done, strict=True)):
            raise InputError(NAN_LOGITS)


class RecordedSearches:
    """Batches of beam searches that run one after the other, and the idle buffers of the last ones.

    At most MAX_IDLE_BUFFERS are kept with their recordings; those used longest ago are freed first.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.idle = model, list[SearchBuffers]()
        self.batch: RecordedSearch | None = None

    def step(self, requests: Sequence[Request]) -> dict[Request, list[BeamHypothesis]]:
        """Run some steps of the searches of these requests, and return the best hypotheses of those that have ended.

        Requests that are new begin together.  After an exception, the next call begins all of them again.
        """
        batch, self.batch = self.batch, None
        if batch is None or not batch.index.keys() >= set(requests):
            if batch is not None:
                self._give_back(batch.buffers)
            batch = self._begin(requests)
        batch.step()
        places = ((request, batch.index[request]) for request in requests)
        ended = {one: batch.searches.best_hypotheses(place) for one, place in places if batch.searches.is_done[place]}
        if len(ended) == len(requests):
            self._give_back(batch.buffers)
        else:
            self.batch = batch
        return ended

    def _begin(self, requests: Sequence[Request]) -> RecordedSearch:
        searches = BeamSearches(requests[0].settings.num_beams, 1, self.model.device)
        searches.add([request.settings for request in requests], [request.token_budget for request in requests])
        key = BufferKey.for_batch([request.prompt for request in requests], searches)
        buffers = next((one for one in self.idle if one.key == key), None)
        if buffers is None:
            buffers = SearchBuffers(self.model, key)
        else:
            self.idle.remove(buffers)
        return RecordedSearch(buffers, requests, searches)

    def _give_back(self, buffers: SearchBuffers) -> None:
        self.idle = [*self.idle, buffers][-MAX_IDLE_BUFFERS:]
