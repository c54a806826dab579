"""Beam search: the n best beginnings of a text are kept and continued together.

A text is scored by the sum of its log-probabilities over its length to the power of the length penalty.  Each step the
2n best continuations are looked at, so that n are left when some of them end (more when there are several end tokens).
Groups (Vijayakumar et al. 2018) search one after the other and pay for tokens that earlier ones have just chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.decoding.settings import Settings

NEVER = -1e9  # the score of a beam that must not be continued


class Hypothesis(NamedTuple):
    tokens: tuple[int, ...]  # the new ones, an end token last where there is one
    score: float


class Candidate(NamedTuple):
    score: float  # the sum of log-probabilities
    beam: int  # the row it continues, counted within its group
    token: int


@dataclass
class Group:
    """The beams of one group of one text: those running and the best that ended."""

    settings: Settings
    size: int
    running: list[Hypothesis] = field(default_factory=list)
    ended: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:  # all rows are alike at first, so only one may be continued
        self.running = [Hypothesis((), 0.0 if row == 0 else NEVER) for row in range(self.size)]

    def advance(self, candidates: list[Candidate], length: int) -> list[int]:
        """Take the candidates (best first) of a step that makes texts `length` long; the beams that go on."""
        last = length >= self.settings.max_new_tokens
        going: list[Candidate] = []
        for rank, new in enumerate(candidates):
            ends = last or new.token in self.settings.eos_token_id
            if ends and rank < self.size and not self.done and new.score > NEVER / 2:
                self._end(new, length)
            going.append(new._replace(score=new.score + NEVER) if ends else new)
        going = sorted(going, key=lambda new: -new.score)[: self.size]
        self.running = [Hypothesis((*self.running[new.beam].tokens, new.token), new.score) for new in going]
        self.done = self.done or last or self._settled(length)
        return [new.beam for new in going]

    def _end(self, new: Candidate, length: int) -> None:
        score = new.score / length**self.settings.length_penalty
        self.ended.append(Hypothesis((*self.running[new.beam].tokens, new.token), score))
        self.ended = sorted(self.ended, key=lambda text: -text.score)[: self.size]

    def _settled(self, length: int) -> bool:
        """Whether what ended cannot be bettered, or is enough."""
        if len(self.ended) < self.size:
            return False
        if self.settings.early_stopping is True:
            return True
        penalty = self.settings.length_penalty
        hoped = self.settings.max_new_tokens if self.settings.early_stopping == "never" and penalty > 0 else length
        return self.running[0].score / hoped**penalty <= self.ended[-1].score


class Beams:
    """The groups of beams of one text."""

    def __init__(self, settings: Settings) -> None:
        size = settings.num_beams // settings.num_beam_groups
        self.settings, self.size, self.length = settings, size, 0
        self.groups = [Group(settings, size) for _ in range(settings.num_beam_groups)]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    @property
    def scores(self) -> list[float]:
        """Of the running beams, row by row."""
        return [beam.score for group in self.groups for beam in group.running]

    @property
    def tokens(self) -> list[int]:
        """The newest token of each row."""
        return [beam.tokens[-1] for group in self.groups for beam in group.running]

    def running_tokens(self, row: int) -> tuple[int, ...]:
        """What one row has said so far."""
        return self.groups[row // self.size].running[row % self.size].tokens

    def best(self) -> list[Hypothesis]:
        """The texts asked for, best first."""
        found = sorted((text for group in self.groups for text in group.ended), key=lambda text: -text.score)
        return found[: self.settings.num_return_sequences]


def advance(texts: list[Beams], shares: Tensor) -> list[int]:
    """One step for texts with equally many beams, from log-probabilities (rows, V) of their rows.

    Returns for each row the row it goes on from.
    """
    settings, vocabulary = texts[0].settings, shares.shape[-1]
    size, groups = texts[0].size, len(texts[0].groups)
    totals = shares + torch.tensor([s for text in texts for s in text.scores], device=shares.device)[:, None]
    totals = totals.view(len(texts), groups, size, vocabulary)
    wanted = max(2, 1 + max(len(text.settings.eos_token_id) for text in texts)) * size
    counts = totals.new_zeros(len(texts), vocabulary) if groups > 1 and settings.diversity_penalty else None
    origins: list[list[list[int]]] = [[] for _ in texts]
    for text in texts:
        text.length += 1
    for group in range(groups):
        looked_at = totals[:, group]
        if counts is not None:
            penalties = totals.new_tensor([text.settings.diversity_penalty for text in texts])[:, None]
            looked_at = looked_at - (penalties * counts)[:, None]
        best, places = looked_at.flatten(1).topk(min(wanted, size * vocabulary))
        rows = zip(best.tolist(), places.tolist(), strict=True)
        for number, (text, (scores, spots)) in enumerate(zip(texts, rows, strict=True)):
            found = [Candidate(s, spot // vocabulary, spot % vocabulary) for s, spot in zip(scores, spots, strict=True)]
            origins[number].append(text.groups[group].advance(found, text.length))
            if counts is not None:
                chosen = [beam.tokens[-1] for beam in text.groups[group].running]
                counts[number] += torch.bincount(counts.new_tensor(chosen).long(), minlength=vocabulary)
    rows_each = groups * size
    return [
        number * rows_each + group * size + beam
        for number, per_group in enumerate(origins)
        for group, beams in enumerate(per_group)
        for beam in beams
    ]
