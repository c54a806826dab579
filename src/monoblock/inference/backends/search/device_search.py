"""Beam search as tensor operations on one device, for many searches at once, without reading a value on the host.

`DeviceSearch` holds the beams of all searches in buffers of fixed shapes and advances them as `BeamGroup` in beam.py
does, hypothesis by hypothesis, so that a CUDA graph can record a step.  Scores are kept in fp64, as Python keeps them;
the sums of log-probabilities are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inference.beam import BLOCKED_SCORE, BeamHypothesis, BeamSearch
from monoblock.inference.settings import Settings
from monoblock.kernels.gpu_beams import best_tokens, supports_best_tokens

SEGMENT_SIZES = range(128, 31, -1)  # number of values of which only the maximum is compared at first


class SearchShape(NamedTuple):
    searches: int
    beams: int
    max_new_tokens: int
    vocab: int
    candidates: int  # the number of continuations to look at
    is_constrained: bool  # whether some tokens are ruled out, in all steps or in the first ones


class Continuations(NamedTuple):
    """The best continuations of each search by one token, best first; each field is (searches, count)."""

    scores: Tensor  # fp64
    beams: Tensor  # the beam that each one continues
    tokens: Tensor


class DeviceSearch:
    """The beams of many searches: `tokens` and `scores` of running hypotheses, and the best finished ones."""

    def __init__(self, shape: SearchShape, device: torch.device) -> None:
        self.shape = shape
        S, n, L, V = shape.searches, shape.beams, shape.max_new_tokens, shape.vocab

        def zeros(*sizes: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        self.scores = zeros(S, n, dtype=torch.double)
        self.tokens = zeros(S, n, L)
        self.newest = zeros(S, n)  # the newest token of each beam
        self.origins = zeros(S, n)  # the beam that each beam continued in the last step
        self.lengths = zeros(S)  # the number of new tokens
        self.done = zeros(S, dtype=torch.bool)
        self.finished_scores = zeros(S, n, dtype=torch.double)  # best first, -inf if there are fewer
        self.finished_tokens = zeros(S, n, L)
        self.finished_lengths = zeros(S, n)  # 0 if there are fewer
        # The settings of each search.  Divisors are `Settings.length_divisor` by length; `best_divisors` are those of
        # the length at which a running hypothesis may score best.
        self.max_new_tokens = zeros(S)
        self.min_new_tokens = zeros(S)
        self.divisors = zeros(S, L + 1, dtype=torch.double)
        self.best_divisors = zeros(S, L + 1, dtype=torch.double)
        self.stops_early = zeros(S, dtype=torch.bool)
        self.is_end = zeros(V, dtype=torch.bool)
        self.suppressed = zeros(V, dtype=torch.bool)
        self.suppressed_first = zeros(V, dtype=torch.bool)  # in the first step
        self.beam_index = torch.arange(n, device=device)[None]

    def begin(self, searches: Sequence[BeamSearch]) -> None:
        """Start new searches, which have the same tokens to end with or to rule out; the other rows stay idle."""
        count, settings, device = len(searches), searches[0].settings, self.scores.device
        for buffer in (self.tokens, self.newest, self.lengths, self.finished_tokens, self.finished_lengths):
            buffer.zero_()
        self.scores.fill_(BLOCKED_SCORE)[:, 0] = 0  # all beams are equal at first, so only one may be continued
        self.finished_scores.fill_(-math.inf)
        self.done.fill_(True)[:count] = False
        index: dict[Settings, int] = {}  # of each setting, in the order of the searches
        rows = torch.tensor([index.setdefault(s.settings, len(index)) for s in searches], device=device)
        divisors, best_divisors = zip(*map(self._length_tables, index), strict=True)
        for buffer, values in (
            (self.divisors, divisors),
            (self.best_divisors, best_divisors),
            (self.max_new_tokens, [own.max_new_tokens for own in index]),
            (self.min_new_tokens, [own.min_new_tokens for own in index]),
            (self.stops_early, [own.early_stopping is True for own in index]),
        ):
            buffer[:count] = torch.tensor(values, dtype=buffer.dtype, device=device)[rows]
        for mask, tokens in (
            (self.is_end, settings.eos_token_id),
            (self.suppressed, settings.suppress_tokens),
            (self.suppressed_first, settings.begin_suppress_tokens),
        ):
            mask.zero_()
            mask[torch.tensor(tokens, dtype=torch.long, device=device)] = True

    def _length_tables(self, settings: Settings) -> tuple[list[float], list[float]]:
        """Return `divisors` and `best_divisors` for one search (see `BeamGroup._can_stop`)."""
        divisors = [1.0, *map(settings.length_divisor, range(1, self.shape.max_new_tokens + 1))]
        is_longest_best = settings.early_stopping == "never" and settings.length_penalty > 0
        return divisors, [divisors[settings.max_new_tokens]] * len(divisors) if is_longest_best else divisors

    # -- one step -------------------------------------------------------------------------------------------------

    def advance(self, logits: Tensor) -> None:
        """Extend the unfinished searches by one token, given logits (searches, beams, V)."""
        n, was_done = self.shape.beams, self.done[:, None]
        best = self._best_continuations(logits)
        self.lengths.add_(~self.done)
        is_last = self.lengths >= self.max_new_tokens
        ends = self.is_end[best.tokens] | is_last[:, None]
        self._collect_finished(best, ends & ~was_done)
        # Continuations that end come last; they are continued only if there are too few others.
        ranked = torch.where(ends, best.scores + BLOCKED_SCORE, best.scores).sort(dim=-1, descending=True, stable=True)
        order = ranked.indices[:, :n]
        self.origins.copy_(torch.where(was_done, self.beam_index, best.beams.gather(1, order)))
        self.newest.copy_(torch.where(was_done, self.newest, best.tokens.gather(1, order)))
        self.scores.copy_(torch.where(was_done, self.scores, ranked.values[:, :n]))
        self.tokens.copy_(self._append(self.origins, self.newest))
        self.done.logical_or_(is_last | self._can_stop())

    def _best_continuations(self, logits: Tensor) -> Continuations:
        count = self.shape.candidates
        if not self.shape.is_constrained and supports_best_tokens(logits, count):
            return Continuations(*best_tokens(logits, self.scores, count))
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        if self.shape.is_constrained:
            is_first, is_early = self.lengths == 0, self.lengths < self.min_new_tokens
            ruled_out = self.suppressed | (is_first[:, None] & self.suppressed_first)
            ruled_out = ruled_out | (is_early[:, None] & self.is_end)
            log_probs = log_probs.masked_fill(ruled_out[:, None], -math.inf)
        return best_continuations(log_probs, self.scores.float(), count)

    def _collect_finished(self, best: Continuations, ends: Tensor) -> None:
        """Add the continuations that end, if they are among the best n, to the finished hypotheses."""
        n = self.shape.beams
        scores, beams, tokens = (field[:, :n] for field in best)
        length = self.lengths[:, None]
        ends = ends[:, :n] & (scores > BLOCKED_SCORE / 2)
        final = torch.where(ends, scores / self.divisors.gather(1, length), -math.inf)
        ranked = torch.cat((self.finished_scores, final), 1).sort(dim=-1, descending=True, stable=True)
        order = ranked.indices[:, :n]
        lengths = torch.cat((self.finished_lengths, torch.where(ends, length, 0)), 1)
        hypotheses = torch.cat((self.finished_tokens, self._append(beams, tokens)), 1)
        self.finished_scores.copy_(ranked.values[:, :n])
        self.finished_lengths.copy_(lengths.gather(1, order))
        self.finished_tokens.copy_(_select_beams(hypotheses, order))

    def _append(self, beams: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens of these beams with one more token each, (searches, count, max_new_tokens)."""
        last = (self.lengths - 1).clamp(min=0)[:, None, None].expand(*beams.shape, 1)
        return _select_beams(self.tokens, beams).scatter_(2, last, tokens[..., None])

    def _can_stop(self) -> Tensor:
        """Return for each search whether it can stop (see `BeamGroup._can_stop`)."""
        best = self.scores[:, 0] / self.best_divisors.gather(1, self.lengths[:, None])[:, 0]
        is_full = self.finished_lengths[:, -1] > 0
        return is_full & (self.stops_early | (best <= self.finished_scores[:, -1]))

    # -- results --------------------------------------------------------------------------------------------------

    def copy_finished(self, rows: Sequence[int], searches: Sequence[BeamSearch], count: int | None = None) -> None:
        """Copy the `count` best finished hypotheses of some rows (None: all) to their `BeamSearch` objects."""
        index = torch.tensor(rows, device=self.scores.device)
        fields = (self.finished_scores, self.finished_tokens, self.finished_lengths)
        scores, tokens, lengths = (field[index, :count].tolist() for field in fields)
        for number, (search, length) in enumerate(zip(searches, self.lengths[index].tolist(), strict=True)):
            hypotheses = zip(scores[number], tokens[number], lengths[number], strict=True)
            search.length = length
            search.groups[0].finished = [
                BeamHypothesis(tuple(text[:size]), score) for score, text, size in hypotheses if size
            ]

    def copy_running(self, rows: Sequence[int], searches: Sequence[BeamSearch]) -> None:
        """Copy the running hypotheses of some rows to their `BeamSearch` objects."""
        index = torch.tensor(rows, device=self.scores.device)
        fields = (self.scores, self.tokens, self.lengths, self.done)
        for search, scores, tokens, length, done in zip(searches, *(f[index].tolist() for f in fields), strict=True):
            group, search.length = search.groups[0], length
            pairs = zip(scores, tokens, strict=True)
            group.running = [BeamHypothesis(tuple(text[:length]), score) for score, text in pairs]
            group.is_done = group.is_done or done


def best_continuations(log_probs: Tensor, scores: Tensor, count: int) -> Continuations:
    """Return the `count` best continuations of each search, by the sum of log-probabilities in fp32.

    log_probs: (searches, beams, V).
    scores: (searches, beams), the sum of log-probabilities of each beam so far.
    Each row of log-probabilities is divided into segments, and only the `count` segments with the largest maxima are
    searched, since a `topk` of all values takes several passes over them.
    """
    S, n, V = log_probs.shape
    count = min(count, n * V)
    size = next((size for size in SEGMENT_SIZES if V % size == 0), None)
    if size is None and 64 * count <= V:
        size = 64
        log_probs = F.pad(log_probs, (0, -V % size), value=-math.inf)
    width = log_probs.shape[-1]
    if size is None or n * width // size <= 2 * count:
        top = (log_probs + scores[..., None]).flatten(1).topk(count)
        return Continuations(top.values.double(), top.indices // width, top.indices % width)
    segments = log_probs.reshape(S, n * width // size, size)
    maxima = segments.amax(-1).view(S, n, -1) + scores[..., None]
    selected = maxima.flatten(1).topk(count).indices.sort(-1).values  # of equal values, the first wins
    origins = selected * size // width
    totals = segments.gather(1, selected[..., None].expand(-1, -1, size)) + scores.gather(1, origins)[..., None]
    top = totals.flatten(1).topk(count)
    index = selected.gather(1, top.indices // size) * size + top.indices % size
    # A padding token can only be among the best if too few tokens are allowed.
    return Continuations(top.values.double(), index // width, (index % width).clamp(max=V - 1))


def _select_beams(tokens: Tensor, beams: Tensor) -> Tensor:
    """Return, from tokens (searches, *, L), those of the beams (searches, count): (searches, count, L)."""
    return tokens.gather(1, beams[..., None].expand(-1, -1, tokens.shape[-1]))
