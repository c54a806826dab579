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
    rows: Iterable[Labelled], encode: Callable[[str, str | None], tuple[Sequence[int], ...]], labels: Sequence[str]
) -> Samples:
    """{"ids", "label"}, the label a row of one, and with pairs of texts "segments".

    `encode` makes (ids, segments) of a text and the text beside it, if there is one.
    """
    number = {label: place for place, label in enumerate(labels)}
    made = [(*encode(row.text, row.pair)[:2], [_number(number, row.label)]) for row in rows]
    samples = _samples(("ids", "segments", "label"), made, None)
    if any(segment for _, segments, _ in made for segment in segments):
        return samples
    return Samples({name: rows for name, rows in samples.fields.items() if name != "segments"}, samples.numbers)


def encode_tagged(
    rows: Iterable[Tagged],
    encode: Callable[[Sequence[str]], tuple[Sequence[int], Sequence[int]]],
    labels: Sequence[str],
) -> Samples:
    """{"ids", "labels"}: the first token of a word bears its label, all others −100.

    `encode` makes of words their ids and the places of their first tokens; words that have no place have no label.
    """
    number = {label: place for place, label in enumerate(labels)}
    return _samples(("ids", "labels"), (tagged(row, *encode(row.words), number) for row in rows), None)


def tagged(
    row: Tagged, ids: Sequence[int], places: Sequence[int], number: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """The ids of a row, and the labels beside them."""
    labels = [IGNORED] * len(ids)
    for label in row.labels[len(places) :]:
        _number(number, label)
    for place, label in zip(places, row.labels, strict=False):
        labels[place] = _number(number, label)
    return ids, labels


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
