"""Labelled words that are other in every epoch: entities exchanged for others of their kind, words hidden, rows in
capitals, merges dropped, neighbouring rows read together.

Each is a function of (seed, epoch, row), so that a resumed run sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monoblock.data.readers import Tagged
from monoblock.tasks.entities import entities
from monoblock.tasks.framing import FramedWords, Words
from monoblock.tasks.sections import DataPart
from monoblock.training.corruption import generator

WAYS = 32  # in which a word is cut where merges are dropped


class Varied:
    """Give it the number of a row and an epoch."""

    def __init__(self, rows: Sequence[Tagged], words: Words, part: DataPart, dropout: float, seed: int) -> None:
        self.rows, self.words, self.part, self.dropout, self.seed = rows, words, part, dropout, seed
        self.mentions = mentions(rows) if part.exchange else {}
        self.known: dict[tuple[str, int], list[int]] = {}
        tokenizer = words.tokenizer
        self.hidden = tokenizer.mask_id if tokenizer.mask_id is not None else words.nothing[0]

    def __call__(self, number: int, epoch: int) -> tuple[Tagged, FramedWords]:
        draw = generator(self.seed, epoch, number)
        count = int(draw.integers(1, self.part.join + 1)) if self.part.join > 1 else 1
        some = exchanged(self.rows[number : number + count], self.mentions, self.part.exchange, draw)
        some = [shouted(row) if self.part.capitals and draw.random() < self.part.capitals else row for row in some]
        pieces = [[self._pieces(word, draw) for word in row.words] for row in some]
        return together(some), self.words.framed(self.words.parted(pieces))

    def _pieces(self, word: str, draw: np.random.Generator) -> list[int]:
        if self.part.hide and draw.random() < self.part.hide:
            return [self.hidden]
        if not self.dropout:
            return self.words.pieces(word)
        return self._cut(word, int(draw.integers(WAYS)))

    def _cut(self, word: str, way: int) -> list[int]:
        """One of the ways to cut a word, each made once: the library of merges is slow to ask."""
        key = (word, way)
        if key not in self.known:
            sample = self.words.tokenizer.sample
            self.known[key] = sample(f" {word}", seed=self.seed, index=way, dropout=self.dropout) or self.words.nothing
        return self.known[key]


def mentions(rows: Sequence[Tagged]) -> dict[str, list[Tagged]]:
    """By kind, every entity that occurs, each once."""
    found: dict[str, dict[Tagged, None]] = {}
    for row in rows:
        for kind, start, end in entities(row.labels):
            found.setdefault(kind, {})[Tagged(row.words[start:end], row.labels[start:end])] = None
    return {kind: list(some) for kind, some in found.items()}


def exchanged(
    rows: Sequence[Tagged], known: dict[str, list[Tagged]], share: float, draw: np.random.Generator
) -> list[Tagged]:
    """Rows in which a share of the entities are others of their kind (Dai and Adel 2020, mention replacement).

    The same words in two of the rows become the same, so that rows still speak of each other.
    """
    if not share:
        return list(rows)
    instead: dict[tuple[str, Tagged], Tagged] = {}

    def other(kind: str, own: Tagged) -> Tagged:
        some, key = known.get(kind, []), (kind, own)
        if key not in instead:
            instead[key] = some[int(draw.integers(len(some)))] if some and draw.random() < share else own
        return instead[key]

    found = []
    for row in rows:
        parts: list[Tagged] = []
        done = 0
        for kind, start, end in entities(row.labels):
            parts.append(Tagged(row.words[done:start], row.labels[done:start]))
            parts.append(other(kind, Tagged(row.words[start:end], row.labels[start:end])))
            done = end
        found.append(together([*parts, Tagged(row.words[done:], row.labels[done:])]))
    return found


def shouted(row: Tagged) -> Tagged:
    """A row in capitals, as headlines are."""
    return Tagged(tuple(word.upper() for word in row.words), row.labels)


def together(rows: Sequence[Tagged]) -> Tagged:
    """Rows one after the other as one."""
    words = tuple(word for row in rows for word in row.words)
    return Tagged(words, tuple(label for row in rows for label in row.labels))


def groups(rows: Sequence[Sequence[str]], count: int, words: Words, between: int = 1) -> list[range]:
    """Neighbouring rows to be read together: at most so many, and no more than fit, `between` tokens between two."""
    found: list[range] = []
    start, length = 0, 0
    frame, limit = words.length(()), words.frame.longest
    for number, row in enumerate(rows):
        more = words.length(row) - frame + between
        full = number - start == count or (limit is not None and frame + length + more - between > limit)
        if number > start and full:
            found.append(range(start, number))
            start, length = number, 0
        length += more
    return [*found, range(start, len(rows))] if rows else []
