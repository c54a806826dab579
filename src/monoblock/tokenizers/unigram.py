"""Fit a Unigram model by expectation-maximization (Kudo 2018), with every sum in a fixed order.

Start from all frequent substrings as pieces, then repeat: compute how often each piece is expected over all
segmentations of all words (forward-backward), and drop the pieces whose removal reduces the likelihood least. The sums
are computed for all words at once, one end position after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_PIECE_LENGTH = 16  # characters, as in SentencePiece
MAX_WORD_LENGTH = 32  # longer words are cut for training, so that products of probabilities do not underflow
SEED_FACTOR = 20  # the initial number of pieces, as a multiple of the final number
KEEP_FRACTION = 0.75  # the fraction of pieces that each pruning round keeps
SLACK_FACTOR = 1.1  # pruning stops at this multiple of `size`; then the least likely pieces are dropped
EM_ROUNDS = 2  # rounds of expectation-maximization before each pruning round
MIN_EXPECTED_COUNT = 0.5  # a piece expected less often is dropped at once

Array = Any  # numpy arrays of float64, int64 or bool


def fit(words: Mapping[str, int], letters: list[str], size: int, min_frequency: int = 1) -> list[tuple[str, float]]:
    """Fit a Unigram model to words and their counts; return (piece, log probability) pairs, most likely first.

    There are at most `size` pieces. All `letters` are kept, even if there are more than `size`.
    """
    counts = _split_long_words(words)
    pieces = _seed_pieces(counts, letters, size, min_frequency)
    expected = np.array(list(pieces.values()), dtype=np.float64)
    names = list(pieces)
    is_letter = np.array([len(name) == 1 for name in names])
    probability = expected / expected.sum()
    lattice = Lattice.build(list(counts), names, include_whole_word=True)
    piece_lattice = Lattice.build(names, names, include_whole_word=False)
    weights = np.array(list(counts.values()), dtype=np.float64)
    while True:
        for _ in range(EM_ROUNDS):
            expected = lattice.expected_counts(probability, weights)
            probability = _sparse_probabilities(expected)
        keep = is_letter | (expected >= MIN_EXPECTED_COUNT)
        if len(names) > size * SLACK_FACTOR:
            keep_count = max(int(size * SLACK_FACTOR), int(KEEP_FRACTION * len(names)))
            loss = _removal_loss(expected, probability, piece_lattice)
            keep &= is_letter | _top_mask(np.where(is_letter, np.inf, loss), keep_count)
        if keep.all():
            break
        names = [name for name, kept in zip(names, keep, strict=True) if kept]
        lattice, piece_lattice = lattice.select(keep), piece_lattice.select(keep, keep)
        is_letter, probability = is_letter[keep], probability[keep] / probability[keep].sum()
    return _select_pieces(names, probability, is_letter, size)


def _split_long_words(words: Mapping[str, int]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(0, len(word), MAX_WORD_LENGTH):
            counts[word[start : start + MAX_WORD_LENGTH]] += count
    return {word: counts[word] for word in sorted(counts)}


def _seed_pieces(counts: Mapping[str, int], letters: list[str], size: int, min_frequency: int) -> dict[str, int]:
    """Return the initial pieces, all letters and the substrings that cover most text, with their counts.

    They are in code point order.
    """
    frequency: Counter[str] = Counter(dict.fromkeys(letters, 0))
    for word, count in counts.items():
        for start in range(len(word)):
            for end in range(start + 1, min(len(word), start + MAX_PIECE_LENGTH) + 1):
                frequency[word[start:end]] += count
    single = {letter: max(1, frequency[letter]) for letter in letters}
    longer = [piece for piece, count in frequency.items() if len(piece) > 1 and count >= max(2, min_frequency)]
    longer = sorted(longer, key=lambda piece: (-frequency[piece] * len(piece), piece))[: SEED_FACTOR * size]
    seeds = single | {piece: frequency[piece] for piece in longer}
    return {piece: seeds[piece] for piece in sorted(seeds)}


def _sparse_probabilities(expected: Array) -> Array:
    """Return exp(digamma(expected)), normalized: the variational Bayes estimate, which favours sparse solutions."""
    share = np.exp(_digamma(np.maximum(expected, 1e-3)) - _digamma(expected.sum()))
    return np.maximum(share, 1e-12) / np.maximum(share, 1e-12).sum()


def _digamma(x: Array) -> Array:
    """Compute the derivative of log gamma: below 7 by its recurrence, above by its asymptotic series."""
    x = np.asarray(x, dtype=np.float64)
    shift = np.zeros_like(x)
    for _ in range(7):
        small = x < 7
        shift = shift + np.where(small, 1 / x, 0)
        x = np.where(small, x + 1, x)
    square = 1 / (x * x)
    return np.log(x) - 0.5 / x - square * (1 / 12 - square * (1 / 120 - square / 252)) - shift


def _removal_loss(expected: Array, probability: Array, piece_lattice: Lattice) -> Array:
    """Return, for each piece, the log likelihood that is lost if shorter pieces replace it wherever it is used."""
    replacement = piece_lattice.word_probabilities(piece_lattice.forward(probability))
    return expected * (np.log(probability) - np.log(np.maximum(replacement, 1e-300)))


def _top_mask(values: Array, count: int) -> Array:
    """Return a mask of the `count` largest values; of equal values, the first ones are taken."""
    mask = np.zeros(len(values), dtype=bool)
    mask[np.argsort(-values, kind="stable")[:count]] = True
    return mask


def _select_pieces(names: list[str], probability: Array, is_letter: Array, size: int) -> list[tuple[str, float]]:
    keep = _top_mask(np.where(is_letter, np.inf, probability), max(size, int(is_letter.sum())))
    score = np.log(probability)
    # Without this limit, a letter that occurs only in longer pieces would be so unlikely that sampling never gives it.
    lowest = score[keep & ~is_letter].min(initial=score.max())
    score = np.where(is_letter, np.maximum(score, lowest - 1), score)
    rows = [(name, round(float(s), 6)) for name, s, kept in zip(names, score, keep, strict=True) if kept]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


@dataclass(frozen=True)
class Lattice:
    """All occurrences of pieces in words, as edges: piece[i] covers word[i] from start[i] to end[i].

    Pieces and words are given by their indices. Edges are sorted by `end`.
    """

    lengths: Array  # of the words, in characters
    word: Array
    start: Array
    end: Array
    piece: Array

    @classmethod
    def build(cls, words: list[str], pieces: list[str], include_whole_word: bool) -> Lattice:
        """Find all occurrences of pieces in words; `include_whole_word` includes pieces that are a whole word."""
        numbers = {piece: number for number, piece in enumerate(pieces)}
        edges = [
            (index, start, end, number)
            for index, word in enumerate(words)
            for start in range(len(word))
            for end in range(start + 1, min(len(word), start + MAX_PIECE_LENGTH) + 1)
            if (number := numbers.get(word[start:end])) is not None and (include_whole_word or end - start < len(word))
        ]
        columns = np.array(edges, dtype=np.int64).reshape(-1, 4)
        columns = columns[np.argsort(columns[:, 2], kind="stable")]
        return cls(np.array([len(word) for word in words], dtype=np.int64), *columns.T.copy())

    def select(self, pieces: Array, words: Array | None = None) -> Lattice:
        """Return a lattice of the pieces (and words) for which the mask is True, with new indices."""
        words = np.ones(len(self.lengths), dtype=bool) if words is None else words
        kept = pieces[self.piece] & words[self.word]
        new_word, new_piece = np.cumsum(words) - 1, np.cumsum(pieces) - 1
        return Lattice(
            self.lengths[words],
            new_word[self.word[kept]],
            self.start[kept],
            self.end[kept],
            new_piece[self.piece[kept]],
        )

    def forward(self, probability: Array) -> Array:
        """Return the total probability of all segmentations of each word up to each position.

        The result has shape (positions, words).
        """
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
        """Return the total probability of all segmentations of each word from each position on.

        The result has shape (positions, words).
        """
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

    def word_probabilities(self, forward: Array) -> Array:
        return forward[self.lengths, np.arange(len(self.lengths))]

    def expected_counts(self, probability: Array, weights: Array) -> Array:
        """Return the expected count of each piece over all segmentations; word i occurs weights[i] times."""
        forward, backward = self.forward(probability), self.backward(probability)
        rate = weights / self.word_probabilities(forward)
        mass = forward[self.start, self.word] * probability[self.piece] * backward[self.end, self.word]
        return np.bincount(self.piece, weights=mass * rate[self.word], minlength=len(probability))
