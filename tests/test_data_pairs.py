"""Samples with an end of their own, as ids: lengths, stable numbers, labels on the first token of a word."""

import numpy as np
import pytest

from monoblock.data.pairs import collate, encode_labelled, encode_pairs, encode_tagged
from monoblock.data.readers import Labelled, Pair, Tagged
from monoblock.errors import InputError


def letters(text):
    return [ord(letter) for letter in text]


def test_pairs_keep_the_numbers_of_their_rows_when_some_are_left_out():
    rows = [Pair("ab", "c"), Pair("toolong", "x"), Pair("d", "efg")]
    samples = encode_pairs(rows, letters, letters, longest=3)
    assert samples.numbers.tolist() == [0, 2]
    assert samples[1]["source"].tolist() == letters("d")
    assert samples[1]["target"].tolist() == letters("efg")
    assert samples.lengths.tolist() == [[2, 1], [1, 3]]
    assert [samples.length(sample) for sample in range(len(samples))] == [3, 4]


def beside(text, pair):
    return letters(text + (pair or "")), [0] * len(text) + [1] * len(pair or "")


def spelled(words):
    ends = [sum(map(len, words[:n])) for n in range(len(words))]
    return letters("".join(words)), ends


def test_labels_become_numbers():
    samples = encode_labelled([Labelled("ab", "b"), Labelled("d", "a")], beside, ["a", "b"])
    assert [samples[i]["label"].tolist() for i in range(2)] == [[1], [0]]
    assert samples[0]["ids"].tolist() == letters("ab")
    assert samples.lengths.tolist() == [[2], [1]]
    assert set(samples[0]) == {"ids", "label"}


def test_a_pair_of_texts_has_segments():
    samples = encode_labelled([Labelled("ab", "b", "xyz"), Labelled("d", "a", "e")], beside, ["a", "b"])
    assert samples[0]["ids"].tolist() == letters("abxyz")
    assert samples[0]["segments"].tolist() == [0, 0, 1, 1, 1]
    assert samples.lengths.tolist() == [[5], [2]], "segments are no text of their own"


def test_the_first_token_of_a_word_bears_its_label():
    samples = encode_tagged([Tagged(("abc", "d", "ef"), ("X", "O", "X"))], spelled, ["O", "X"])
    assert samples[0]["ids"].tolist() == letters("abcdef")
    assert samples[0]["labels"].tolist() == [1, -100, -100, 0, 1, -100]


def test_collate_fills_up_on_the_right_by_field():
    rows = [{"ids": np.array([1, 2, 3]), "labels": np.array([4])}, {"ids": np.array([5]), "labels": np.array([6, 7])}]
    out = collate(rows, {"ids": 9, "labels": -100})
    assert out["ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert out["labels"].tolist() == [[4, -100], [6, 7]]


def test_what_cannot_be_is_one_line():
    with pytest.raises(InputError, match="longest=1"):
        encode_pairs([Pair("ab", "cd")], letters, letters, longest=1)
    with pytest.raises(InputError, match="'B-PRE' is none of the 2 known; did you mean 'B-PER'"):
        encode_tagged([Tagged(("a",), ("B-PRE",))], spelled, ["O", "B-PER"])
