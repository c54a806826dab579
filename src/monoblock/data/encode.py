"""Encode rows of a corpus (pairs, labelled texts, tagged sentences) into datasets of token ids.

Each sample keeps the index of its row in the corpus, even if rows before it were dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monoblock.data.readers.records import LabelledText, Pair, TaggedSentence
from monoblock.errors import InputError, did_you_mean

Encode = Callable[[str], Sequence[int]]
IGNORE_INDEX = -100  # a label that the loss ignores
TEXT_FIELDS = ("source", "target", "ids")


class RaggedArray:
    """A list of integer sequences of different lengths, stored in one flat array.

    It takes less memory than a list of lists, and worker processes created by fork share it.
    """

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        flat, offsets = array("q"), array("q", [0])
        for row in rows:
            flat.extend(row)
            offsets.append(len(flat))
        self._flat = np.frombuffer(flat, np.int64) if flat else np.empty(0, np.int64)
        self._offsets = np.frombuffer(offsets, np.int64)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        return self._flat[self._offsets[row] : self._offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._offsets)


@dataclass(frozen=True)
class EncodedDataset:
    """Encoded samples: `fields` maps names such as "source" to the ids of all samples.

    `row_numbers` gives the index of each sample's row in the corpus.
    """

    fields: Mapping[str, RaggedArray]
    row_numbers: NDArray[np.int64]

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[int, Mapping[str, Sequence[int]]]]) -> EncodedDataset:
        """Build a dataset from pairs (row number, fields of the sample)."""
        kept = list(samples)
        fields = {name: RaggedArray(sample[name] for _, sample in kept) for name in (kept[0][1] if kept else ())}
        return cls(fields, np.array([number for number, _ in kept], np.int64))

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, sample: int) -> dict[str, NDArray[np.int64]]:
        return {name: rows[sample] for name, rows in self.fields.items()}

    def length(self, sample: int) -> int:
        """Return the number of tokens in a sample, summed over its texts."""
        return sum(len(rows[sample]) for name, rows in self.fields.items() if name in TEXT_FIELDS)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each text, an array of shape (samples, texts) for `BucketBatchPlan`."""
        return np.stack([rows.lengths for name, rows in self.fields.items() if name in TEXT_FIELDS], axis=1)


def encode_pairs(
    rows: Iterable[Pair], encode_source: Encode, encode_target: Encode, *, longest: int | None = None
) -> EncodedDataset:
    """Encode pairs to the fields "source" and "target".

    A pair is dropped if its source or target is empty or has more than `longest` tokens.
    """
    encoded = ((encode_source(row.source), encode_target(row.target)) for row in rows)
    return _build_dataset(("source", "target"), encoded, longest)


def encode_labelled(
    rows: Iterable[LabelledText], encode: Callable[[str, str | None], tuple[Sequence[int], ...]], labels: Sequence[str]
) -> EncodedDataset:
    """Encode texts to the fields "ids", "label" (one id) and, if any row is a pair of texts, "segments".

    `encode(text, text_pair)` returns (ids, segments); `text_pair` is None for a single text. The id of a label is its
    index in `labels`.
    """
    label_ids = {label: number for number, label in enumerate(labels)}
    encoded = [(*encode(row.text, row.text_pair)[:2], [_label_id(label_ids, row.label)]) for row in rows]
    dataset = _build_dataset(("ids", "segments", "label"), encoded, None)
    if any(segment for _, segments, _ in encoded for segment in segments):
        return dataset
    fields = {name: field for name, field in dataset.fields.items() if name != "segments"}
    return EncodedDataset(fields, dataset.row_numbers)


def encode_tagged(
    rows: Iterable[TaggedSentence],
    encode: Callable[[Sequence[str]], tuple[Sequence[int], Sequence[int]]],
    labels: Sequence[str],
) -> EncodedDataset:
    """Encode sentences to the fields "ids" and "labels", where labels[i] is the label id of token i.

    The first token of a word has the label of the word, and all other tokens have IGNORE_INDEX. `encode(words)` returns
    the token ids and the index of each word's first token; it may leave out words at the end of a long sentence.
    """
    label_ids = {label: number for number, label in enumerate(labels)}
    return _build_dataset(("ids", "labels"), (align_labels(row, *encode(row.words), label_ids) for row in rows), None)


def align_labels(
    row: TaggedSentence, ids: Sequence[int], first_tokens: Sequence[int], label_ids: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return `ids` and one label id per token: the label of each word at its first token, elsewhere IGNORE_INDEX."""
    labels = [IGNORE_INDEX] * len(ids)
    for label in row.labels[len(first_tokens) :]:
        _label_id(label_ids, label)
    for index, label in zip(first_tokens, row.labels, strict=False):
        labels[index] = _label_id(label_ids, label)
    return ids, labels


def _label_id(label_ids: Mapping[str, int], label: str) -> int:
    if label not in label_ids:
        raise InputError(
            f"label {label!r} is not one of the {len(label_ids)} known labels{did_you_mean(label, label_ids)}"
        )
    return label_ids[label]


def _build_dataset(
    names: Sequence[str], encoded: Iterable[Sequence[Sequence[int]]], longest: int | None
) -> EncodedDataset:
    kept: list[Sequence[Sequence[int]]] = []
    numbers = []
    for number, row in enumerate(encoded):
        if all(map(len, row)) and (longest is None or max(map(len, row)) <= longest):
            kept.append(row)
            numbers.append(number)
    if not kept:
        limit = (
            "; give rows with text" if longest is None else f" or has more than longest={longest} tokens; raise longest"
        )
        raise InputError(f"no sample is left, because every row is empty{limit}")
    fields = {name: RaggedArray(row[index] for row in kept) for index, name in enumerate(names)}
    return EncodedDataset(fields, np.array(numbers, np.int64))
