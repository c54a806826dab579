"""Beam search: the n best beginnings of a text are kept and continued together.

A text is scored by the sum of its log-probabilities over its length to the power of the length penalty.  Each step the
2n best continuations are looked at, so that n are left when some of them end (more when there are several end tokens).
Groups (Vijayakumar et al. 2018) search one after the other and pay for tokens that earlier ones have just chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.decoding.ranking import best
from monoblock.decoding.settings import Settings

NEVER = -1e9  # the score of a beam that must not be continued


class Hypothesis(NamedTuple):
    tokens: tuple[int, ...]  # the new ones, an end token last where there is one
    score: float


class Candidates(NamedTuple):
    """Continuations of the beams of one group, best first."""

    scores: list[float]  # sums of log-probabilities
    beams: list[int]  # the row each continues, counted within its group
    tokens: list[int]


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

    def advance(self, new: Candidates, length: int) -> list[int]:
        """Take the candidates of a step that makes texts `length` long; the beams that go on."""
        last, ends = length >= self.settings.max_new_tokens, self.settings.eos_token_id
        going: Iterable[tuple[float, int, int]] = zip(*new, strict=True)
        if last or any(end in new.tokens for end in ends):
            going = self._ending(list(going), length, last)
        chosen = list(islice(going, self.size))
        self.running = [Hypothesis((*self.running[beam].tokens, token), score) for score, beam, token in chosen]
        self.done = self.done or last or self._settled(length)
        return [beam for _, beam, _ in chosen]

    def _ending(self, new: list[tuple[float, int, int]], length: int, last: bool) -> list[tuple[float, int, int]]:
        """Keep what ends here; what goes on comes first in what is returned."""
        going = []
        for rank, (score, beam, token) in enumerate(new):
            ends = last or token in self.settings.eos_token_id
            if ends and rank < self.size and not self.done and score > NEVER / 2:
                found = Hypothesis((*self.running[beam].tokens, token), score / length**self.settings.length_penalty)
                self.ended = sorted([*self.ended, found], key=lambda text: -text.score)[: self.size]
            going.append((score + NEVER if ends else score, beam, token))
        return sorted(going, key=lambda one: -one[0])

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
        if len(self.groups) == 1:  # the usual case, asked for often
            return self.groups[0].done
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
    size, groups, vocabulary = texts[0].size, len(texts[0].groups), shares.shape[-1]
    totals = (shares + sums(texts, shares.device)[:, None]).view(len(texts), groups, size, vocabulary)
    counts = totals.new_zeros(len(texts), vocabulary) if groups > 1 and texts[0].settings.diversity_penalty else None
    origins: list[list[list[int]]] = []
    for group in range(groups):
        looked_at = totals[:, group]
        if counts is not None:
            penalties = totals.new_tensor([text.settings.diversity_penalty for text in texts])[:, None]
            looked_at = looked_at - (penalties * counts)[:, None]
        best, places = looked_at.flatten(1).topk(min(wanted(texts), size * vocabulary))
        origins.append(_taken(texts, group, best, places, vocabulary))
        if counts is not None:
            for number, text in enumerate(texts):
                chosen = [beam.tokens[-1] for beam in text.groups[group].running]
                counts[number] += torch.bincount(counts.new_tensor(chosen).long(), minlength=vocabulary)
    return _rows(texts, origins)


def advance_plainly(texts: list[Beams], logits: Tensor, without: Sequence[int] = ()) -> list[int]:
    """The same for searches of one group in which nothing but `without` is ruled out, from logits."""
    found = best(logits, sums(texts, logits.device), without, texts[0].size, wanted(texts))
    return advance_found(texts, *found, logits.shape[-1])


def advance_found(texts: list[Beams], best: Tensor, places: Tensor, vocabulary: int) -> list[int]:
    """The same from the best continuations of each text, found before."""
    return _rows(texts, [_taken(texts, 0, best, places, vocabulary)])


def wanted(texts: list[Beams]) -> int:
    """How many continuations are looked at: as many as there are beams are left when some of them end."""
    return max(2, 1 + max(len(text.settings.eos_token_id) for text in texts)) * texts[0].size


def sums(texts: list[Beams], device: torch.device) -> Tensor:
    """The scores of the running beams, row by row."""
    return torch.tensor([score for text in texts for score in text.scores], device=device)


def _taken(texts: list[Beams], group: int, best: Tensor, places: Tensor, vocabulary: int) -> list[list[int]]:
    """Give each text its candidates (texts, count); the beams that go on in one of its groups."""
    parts = (best.tolist(), (places // vocabulary).tolist(), (places % vocabulary).tolist())
    found = []
    for text, *one in zip(texts, *parts, strict=True):
        text.length += group == 0
        over = text.done and len(text.groups) == 1  # its rows wait to be taken away
        found.append(list(range(text.size)) if over else text.groups[group].advance(Candidates(*one), text.length))
    return found


def _rows(texts: list[Beams], origins: list[list[list[int]]]) -> list[int]:
    """Rows of the whole batch from beams within the groups of each text."""
    size, groups = texts[0].size, len(origins)
    return [
        (number * groups + group) * size + beam
        for number in range(len(texts))
        for group in range(groups)
        for beam in origins[group][number]
    ]
