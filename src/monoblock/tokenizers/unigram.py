"""The Unigram model fitted by expectation-maximization (Kudo 2018), every sum in a fixed order.

Start from all frequent substrings, then repeat: estimate how often each piece is used over all segmentations of all
words (forward-backward), and drop the pieces whose loss costs the likelihood least. All words advance together, one
end position at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LONGEST_PIECE = 16  # characters, as in SentencePiece
LONGEST_WORD = 32  # longer words are cut for training, so that the product of so many probabilities stays a number
SEEDS = 20  # candidates a wanted piece
KEPT = 0.75  # of the pieces in a round
SPARE = 1.1  # how many more than wanted are left to the last cut, which goes by probability
ROUNDS = 2  # of expectation-maximization between two cuts
LEAST_USE = 0.5  # a piece expected less often than this is dropped at once

Array = Any  # numpy's arrays; their element types say nothing here that the names do not


def fit(words: Mapping[str, int], letters: list[str], size: int, least: int = 1) -> list[tuple[str, float]]:
    """At most `size` pieces with their log probabilities, likely ones first; every letter is among them."""
    counts = _shortened(words)
    pieces = _seeds(counts, letters, size, least)
    use = np.array(list(pieces.values()), dtype=np.float64)
    names = list(pieces)
    fixed = np.array([len(name) == 1 for name in names])
    probability = use / use.sum()
    lattice = Lattice.of(list(counts), names, whole=True)
    inner = Lattice.of(names, names, whole=False)
    weights = np.array(list(counts.values()), dtype=np.float64)
    while True:
        for _ in range(ROUNDS):
            use = lattice.expected(probability, weights)
            probability = _sparse(use)
        wanted = max(int(size * SPARE), int(KEPT * len(names)))
        done = len(names) <= size * SPARE
        loss = _loss(use, probability, inner)
        keep = fixed | (use >= LEAST_USE)
        if not done:
            keep &= fixed | _best(np.where(fixed, np.inf, loss), wanted)
        if keep.all():
            break
        names = [name for name, kept in zip(names, keep, strict=True) if kept]
        lattice, inner = lattice.kept(keep), inner.kept(keep, keep)
        fixed, probability = fixed[keep], probability[keep] / probability[keep].sum()
    return _chosen(names, probability, fixed, size)


def _shortened(words: Mapping[str, int]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(0, len(word), LONGEST_WORD):
            counts[word[start : start + LONGEST_WORD]] += count
    return {word: counts[word] for word in sorted(counts)}


def _seeds(counts: Mapping[str, int], letters: list[str], size: int, least: int) -> dict[str, int]:
    """All letters, and the substrings that cover most text, in the order of their code points."""
    found: Counter[str] = Counter(dict.fromkeys(letters, 0))
    for word, count in counts.items():
        for start in range(len(word)):
            for end in range(start + 1, min(len(word), start + LONGEST_PIECE) + 1):
                found[word[start:end]] += count
    single = {letter: max(1, found[letter]) for letter in letters}
    longer = [piece for piece, count in found.items() if len(piece) > 1 and count >= max(2, least)]
    longer = sorted(longer, key=lambda piece: (-found[piece] * len(piece), piece))[: SEEDS * size]
    seeds = single | {piece: found[piece] for piece in longer}
    return {piece: seeds[piece] for piece in sorted(seeds)}


def _sparse(use: Array) -> Array:
    """exp(digamma(use)), normalized: the mean under a Dirichlet prior, which starves what is hardly used."""
    share = np.exp(_digamma(np.maximum(use, 1e-3)) - _digamma(use.sum()))
    return np.maximum(share, 1e-12) / np.maximum(share, 1e-12).sum()


def _digamma(x: Array) -> Array:
    """The derivative of log gamma: up to 7 by its recurrence, from there by its asymptotic series."""
    x = np.asarray(x, dtype=np.float64)
    shift = np.zeros_like(x)
    for _ in range(7):
        small = x < 7
        shift = shift + np.where(small, 1 / x, 0)
        x = np.where(small, x + 1, x)
    square = 1 / (x * x)
    return np.log(x) - 0.5 / x - square * (1 / 12 - square * (1 / 120 - square / 252)) - shift


def _loss(use: Array, probability: Array, inner: Lattice) -> Array:
    """How much log likelihood is lost when a piece is cut into others wherever it was used."""
    instead = inner.totals(inner.forward(probability))
    return use * (np.log(probability) - np.log(np.maximum(instead, 1e-300)))


def _best(values: Array, count: int) -> Array:
    """True at the `count` largest; among equals the first."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def _chosen(names: list[str], probability: Array, fixed: Array, size: int) -> list[tuple[str, float]]:
    keep = _best(np.where(fixed, np.inf, probability), max(size, int(fixed.sum())))
    score = np.log(probability)
    # A letter that only longer pieces used would be next to impossible, and no sample would ever be cut that far.
    lowest = score[keep & ~fixed].min(initial=score.max())
    score = np.where(fixed, np.maximum(score, lowest - 1), score)
    rows = [(name, round(float(s), 6)) for name, s, kept in zip(names, score, keep, strict=True) if kept]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


@dataclass(frozen=True)
class Lattice:
    """Every place where a piece fits into a word: an edge of `word` from `start` to `end`, sorted by `end`."""

    lengths: Array  # of the words
    word: Array
    start: Array
    end: Array
    piece: Array

    @classmethod
    def of(cls, words: list[str], pieces: list[str], whole: bool) -> Lattice:
        """All edges; unless `whole`, without the one that is the word itself."""
        number = {piece: place for place, piece in enumerate(pieces)}
        edges = [
            (place, start, end, found)
            for place, word in enumerate(words)
            for start in range(len(word))
            for end in range(start + 1, min(len(word), start + LONGEST_PIECE) + 1)
            if (found := number.get(word[start:end])) is not None and (whole or end - start < len(word))
        ]
        columns = np.array(edges, dtype=np.int64).reshape(-1, 4)
        columns = columns[np.argsort(columns[:, 2], kind="stable")]
        return cls(np.array([len(word) for word in words], dtype=np.int64), *columns.T.copy())

    def kept(self, pieces: Array, words: Array | None = None) -> Lattice:
        """Without the edges of the pieces (and the words) that are False, the others numbered anew."""
        words = np.ones(len(self.lengths), dtype=bool) if words is None else words
        stays = pieces[self.piece] & words[self.word]
        new_word, new_piece = np.cumsum(words) - 1, np.cumsum(pieces) - 1
        return Lattice(
            self.lengths[words],
            new_word[self.word[stays]],
            self.start[stays],
            self.end[stays],
            new_piece[self.piece[stays]],
        )

    def forward(self, probability: Array) -> Array:
        """(position, word): the probability of all ways to cut the word up to there."""
        total = np.zeros((int(self.lengths.max(initial=0)) + 1, len(self.lengths)))
        total[0] = 1
        bounds = np.searchsorted(self.end, np.arange(len(total) + 1))
        for end in range(1, len(total)):
            edges = slice(bounds[end], bounds[end + 1])
            word = self.word[edges]
            mass = total[self.start[edges], word] * probability[self.piece[edges]]
            total[end] = np.bincount(word, weights=mass, minlength=len(self.lengths))
        return total

    def backward(self, probability: Array) -> Array:
        """(position, word): the probability of all ways to cut the word from there on."""
        total = np.zeros((int(self.lengths.max(initial=0)) + 1, len(self.lengths)))
        total[self.lengths, np.arange(len(self.lengths))] = 1
        order = np.argsort(self.start, kind="stable")
        bounds = np.searchsorted(self.start[order], np.arange(len(total) + 1))
        for start in range(len(total) - 2, -1, -1):
            edges = order[bounds[start] : bounds[start + 1]]
            word = self.word[edges]
            mass = total[self.end[edges], word] * probability[self.piece[edges]]
            total[start] += np.bincount(word, weights=mass, minlength=len(self.lengths))
        return total

    def totals(self, forward: Array) -> Array:
        return forward[self.lengths, np.arange(len(self.lengths))]

    def expected(self, probability: Array, weights: Array) -> Array:
        """How often each piece is used, over all words and all ways to cut them."""
        forward, backward = self.forward(probability), self.backward(probability)
        rate = weights / self.totals(forward)
        mass = forward[self.start, self.word] * probability[self.piece] * backward[self.end, self.word]
        return np.bincount(self.piece, weights=mass * rate[self.word], minlength=len(probability))
