"""Samples that have an end of their own: pairs, labelled texts, tagged words, as token ids.

A sample's number is the number of its row in the corpus, whatever was left out before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monoblock.data.readers import Labelled, Pair, Tagged
from monoblock.errors import InputError, did_you_mean

Encode = Callable[[str], Sequence[int]]
IGNORED = -100  # a label that is not counted


class Ragged:
    """Rows of different lengths in one array: little memory, and nothing to copy when a process forks."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        flat, ends = array("q"), array("q", [0])
        for row in rows:
            flat.extend(row)
            ends.append(len(flat))
        self._flat = np.frombuffer(flat, np.int64) if flat else np.empty(0, np.int64)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        return self._flat[self._ends[row] : self._ends[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._ends)


@dataclass(frozen=True)
class Samples:
    """Named rows of ids, and the corpus row each came from.  Fields of one length a sample are given by name."""

    fields: Mapping[str, Ragged]
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, sample: int) -> dict[str, NDArray[np.int64]]:
        return {name: rows[sample] for name, rows in self.fields.items()}

    def length(self, sample: int) -> int:
        """How many tokens a sample has, over its texts."""
        return sum(len(rows[sample]) for name, rows in self.fields.items() if name in TEXTS)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(samples, texts): the tokens of each text, for `BucketPlan`."""
        return np.stack([rows.lengths for name, rows in self.fields.items() if name in TEXTS], axis=1)


TEXTS = ("source", "target", "ids")


def encode_pairs(rows: Iterable[Pair], source: Encode, target: Encode, *, longest: int | None = None) -> Samples:
    """{"source", "target"}; a pair longer than `longest` on either side is left out."""
    return _samples(("source", "target"), ((source(row.source), target(row.target)) for row in rows), longest)


def encode_labelled(
    rows: Iterable[Labelled], encode: Encode, labels: Sequence[str], *, longest: int | None = None
) -> Samples:
    """{"ids", "label"}, the label a row of one; a longer text is cut."""
    number = {label: place for place, label in enumerate(labels)}
    made = ((list(encode(row.text))[:longest], [_number(number, row.label)]) for row in rows)
    return _samples(("ids", "label"), made, None)


def encode_tagged(
    rows: Iterable[Tagged], encode: Encode, labels: Sequence[str], *, longest: int | None = None
) -> Samples:
    """{"ids", "labels"}: the first token of a word bears its label, the others −100; a longer row is cut.

    `encode` is given each word alone; where a tokenizer marks the space before a word, it must add it.
    """
    number = {label: place for place, label in enumerate(labels)}
    return _samples(("ids", "labels"), (_tagged(row, encode, number, longest) for row in rows), None)


def _tagged(
    row: Tagged, encode: Encode, number: Mapping[str, int], longest: int | None
) -> tuple[Sequence[int], Sequence[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for word, label in zip(row.words, row.labels, strict=True):
        tokens = list(encode(word))
        ids += tokens
        labels += [_number(number, label), *[IGNORED] * (len(tokens) - 1)][: len(tokens)]
    return ids[:longest], labels[:longest]


def _number(number: Mapping[str, int], label: str) -> int:
    if label not in number:
        raise InputError(f"the label {label!r} is none of the {len(number)} known{did_you_mean(label, number)}")
    return number[label]


def _samples(names: Sequence[str], made: Iterable[Sequence[Sequence[int]]], longest: int | None) -> Samples:
    kept: list[Sequence[Sequence[int]]] = []
    numbers = []
    for number, row in enumerate(made):
        if all(map(len, row)) and (longest is None or max(map(len, row)) <= longest):
            kept.append(row)
            numbers.append(number)
    if not kept:
        raise InputError(f"no row fits: all are empty or longer than longest={longest}; raise it")
    fields = {name: Ragged(row[place] for row in kept) for place, name in enumerate(names)}
    return Samples(fields, np.array(numbers, np.int64))


def collate(rows: Sequence[Mapping[str, NDArray[np.int64]]], fill: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """Rows side by side, (B, longest) a field, filled up on the right; `fill` says with what, by field."""
    out = {}
    for name in rows[0] if rows else ():
        width = max(len(row[name]) for row in rows)
        out[name] = np.full((len(rows), width), fill.get(name, 0), np.int64)
        for place, row in enumerate(rows):
            out[name][place, : len(row[name])] = row[name]
    return out
