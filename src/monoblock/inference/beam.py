"""Beam search: keep the n best partial hypotheses of a request and extend them together.

A finished hypothesis is scored by the sum of its log-probabilities / `Settings.length_divisor`.  Each step considers
the 2n best continuations (more with several end tokens), so that n remain if some of them end.  In a diverse
beam search (Vijayakumar et al. 2018) the beams form groups that advance one after the other, and each group is
penalized for tokens that the earlier groups have chosen at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.inference.ranking import top_continuations
from monoblock.inference.settings import Settings

BLOCKED_SCORE = -1e9  # the score of a beam that must not be continued


class BeamHypothesis(NamedTuple):
    tokens: tuple[int, ...]  # new tokens, including the end token if there is one
    score: float  # sum of log-probabilities; divided by `Settings.length_divisor` once finished


class Candidates(NamedTuple):
    """The best continuations, by one token, of the beams in one group; best first."""

    scores: list[float]  # sums of log-probabilities
    beams: list[int]  # index, within the group, of the beam that each one continues
    tokens: list[int]


@dataclass
class BeamGroup:
    """One group of beams of one request: the running hypotheses and the best finished ones."""

    settings: Settings
    size: int
    running: list[BeamHypothesis] = field(default_factory=list)
    finished: list[BeamHypothesis] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        # All beams are equal at first, so only one may be continued.
        self.running = [BeamHypothesis((), 0.0 if row == 0 else BLOCKED_SCORE) for row in range(self.size)]

    def advance(self, candidates: Candidates, length: int) -> list[int]:
        """Extend the beams by one token, to `length` new tokens, with the best of the candidates.

        Return, for each new beam, the index of the old beam that it continues.
        """
        is_last, eos_tokens = length >= self.settings.max_new_tokens, self.settings.eos_token_id
        ranked: Iterable[tuple[float, int, int]] = zip(*candidates, strict=True)
        if is_last or any(token in candidates.tokens for token in eos_tokens):
            ranked = self._collect_finished(list(ranked), length, is_last)
        chosen = list(islice(ranked, self.size))
        self.running = [BeamHypothesis((*self.running[beam].tokens, token), score) for score, beam, token in chosen]
        self.is_done = self.is_done or is_last or self._can_stop(length)
        return [beam for _, beam, _ in chosen]

    def _collect_finished(
        self, candidates: list[tuple[float, int, int]], length: int, is_last: bool
    ) -> list[tuple[float, int, int]]:
        """Add candidates that end here to the finished hypotheses; return all candidates, those that go on first."""
        ranked = []
        for rank, (score, beam, token) in enumerate(candidates):
            ends = is_last or token in self.settings.eos_token_id
            if ends and rank < self.size and not self.is_done and score > BLOCKED_SCORE / 2:
                final_score = score / self.settings.length_divisor(length)
                hypothesis = BeamHypothesis((*self.running[beam].tokens, token), final_score)
                self.finished = _best_first([*self.finished, hypothesis])[: self.size]
            ranked.append((score + BLOCKED_SCORE if ends else score, beam, token))
        return sorted(ranked, key=lambda candidate: -candidate[0])

    def _can_stop(self, length: int) -> bool:
        """Return whether the search of this group can stop.

        It can once `size` hypotheses are finished, if `early_stopping` is True or if no running hypothesis can still
        score higher than the worst of them.
        """
        if len(self.finished) < self.size:
            return False
        if self.settings.early_stopping is True:
            return True
        # "never" assumes the length at which a running hypothesis can score best: the maximum if length is rewarded.
        is_longest_best = self.settings.early_stopping == "never" and self.settings.length_penalty > 0
        best_length = self.settings.max_new_tokens if is_longest_best else length
        return self.running[0].score / self.settings.length_divisor(best_length) <= self.finished[-1].score


def _best_first(hypotheses: Iterable[BeamHypothesis]) -> list[BeamHypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


class BeamSearch:
    """The beam search of one request: one or more groups of `size` beams each.  Every beam is a row of the batch."""

    def __init__(self, settings: Settings) -> None:
        size = settings.num_beams // settings.num_beam_groups
        self.settings, self.size, self.length = settings, size, 0
        self.groups = [BeamGroup(settings, size) for _ in range(settings.num_beam_groups)]

    @property
    def is_done(self) -> bool:
        if len(self.groups) == 1:  # shorter than all(…), and called often
            return self.groups[0].is_done
        return all(group.is_done for group in self.groups)

    def stop(self) -> None:
        """End the search without further hypotheses."""
        for group in self.groups:
            group.is_done = True

    @property
    def scores(self) -> list[float]:
        """The score of each running beam, in the order of the rows."""
        return [beam.score for group in self.groups for beam in group.running]

    @property
    def last_tokens(self) -> list[int]:
        """The newest token of each row."""
        return [beam.tokens[-1] for group in self.groups for beam in group.running]

    def running_tokens(self, row: int) -> tuple[int, ...]:
        """Return the tokens generated so far in one row."""
        return self.groups[row // self.size].running[row % self.size].tokens

    def best_hypotheses(self) -> list[BeamHypothesis]:
        """Return the `num_return_sequences` best finished hypotheses, best first."""
        finished = _best_first(hypothesis for group in self.groups for hypothesis in group.finished)
        return finished[: self.settings.num_return_sequences]


def advance_from_log_probs(searches: list[BeamSearch], log_probs: Tensor) -> list[int]:
    """Advance searches with equally many beams by one token, given the log-probabilities (rows, V) of their beams.

    Return, for each row, the index of the row that it continues.
    """
    size, groups, vocabulary = searches[0].size, len(searches[0].groups), log_probs.shape[-1]
    totals = log_probs + beam_scores(searches, log_probs.device)[:, None]
    totals = totals.view(len(searches), groups, size, vocabulary)
    is_diverse = groups > 1 and any(search.settings.diversity_penalty for search in searches)
    # How often the earlier groups have chosen each token at this step.
    counts = totals.new_zeros(len(searches), vocabulary) if is_diverse else None
    origins: list[list[list[int]]] = []
    for group in range(groups):
        group_totals = totals[:, group]
        if counts is not None:
            penalties = totals.new_tensor([search.settings.diversity_penalty for search in searches])[:, None]
            group_totals = group_totals - (penalties * counts)[:, None]
        scores, indices = group_totals.flatten(1).topk(min(num_candidates(searches), size * vocabulary))
        origins.append(_advance_group(searches, group, scores, indices, vocabulary))
        if counts is not None:
            for index, search in enumerate(searches):
                chosen = [beam.tokens[-1] for beam in search.groups[group].running]
                counts[index] += torch.bincount(counts.new_tensor(chosen).long(), minlength=vocabulary)
    return _batch_rows(searches, origins)


def advance_from_logits(searches: list[BeamSearch], logits: Tensor, suppressed: Sequence[int] = ()) -> list[int]:
    """Advance searches that have only one group each by one token, given logits (rows, V) of their beams.

    Tokens in `suppressed` are not chosen.  Return, for each row, the index of the row that it continues.
    """
    scores = beam_scores(searches, logits.device)
    top = top_continuations(logits, scores, suppressed, searches[0].size, num_candidates(searches))
    return _batch_rows(searches, [_advance_group(searches, 0, *top, logits.shape[-1])])


def num_candidates(searches: list[BeamSearch]) -> int:
    """Return how many of the best continuations to look at, so that enough remain without those that end."""
    return max(2, 1 + max(len(search.settings.eos_token_id) for search in searches)) * searches[0].size


def beam_scores(searches: list[BeamSearch], device: torch.device) -> Tensor:
    """Return the scores (rows,) of the running beams of all searches."""
    scores = [score for search in searches for score in search.scores]
    return torch.tensor(scores, dtype=torch.float32, device=device)


def _advance_group(
    searches: list[BeamSearch], group: int, scores: Tensor, indices: Tensor, vocabulary: int
) -> list[list[int]]:
    """Advance one group of each search by one token, given its best continuations.

    scores: their scores (searches, count), best first.
    indices: their beams and tokens as beam · V + token, (searches, count).
    Return, for each search, the indices of the old beams that its new beams continue.
    """
    candidates = (scores.tolist(), (indices // vocabulary).tolist(), (indices % vocabulary).tolist())
    origins = []
    for search, *columns in zip(searches, *candidates, strict=True):
        search.length += group == 0
        if search.is_done and len(search.groups) == 1:  # the engine removes its rows later
            origins.append(list(range(search.size)))
        else:
            origins.append(search.groups[group].advance(Candidates(*columns), search.length))
    return origins


def _batch_rows(searches: list[BeamSearch], origins: list[list[list[int]]]) -> list[int]:
    """Convert `origins[group][search]`, lists of beam indices within a group, to row indices of the batch."""
    size, groups = searches[0].size, len(origins)
    return [
        (index * groups + group) * size + beam
        for index in range(len(searches))
        for group in range(groups)
        for beam in origins[group][index]
    ]
