"""Encoded datasets: lengths, stable row numbers, labels on the first token of a word, collation."""

import pytest

from monoblock.data.encode import encode_labelled, encode_pairs, encode_tagged
from monoblock.data.readers.records import LabelledText, Pair, TaggedSentence
from monoblock.errors import InputError


def encode(text):
    return [ord(letter) for letter in text]


def test_pairs_keep_their_row_numbers_when_others_are_dropped():
    rows = [Pair("ab", "c"), Pair("toolong", "x"), Pair("d", "efg")]
    dataset = encode_pairs(rows, encode, encode, longest=3)
    assert dataset.row_numbers.tolist() == [0, 2]
    assert dataset[1]["source"].tolist() == encode("d")
    assert dataset[1]["target"].tolist() == encode("efg")
    assert dataset.lengths.tolist() == [[2, 1], [1, 3]]
    assert [dataset.length(sample) for sample in range(len(dataset))] == [3, 4]


def encode_with_segments(text, pair):
    return encode(text + (pair or "")), [0] * len(text) + [1] * len(pair or "")


def encode_words(words):
    starts = [sum(map(len, words[:n])) for n in range(len(words))]
    return encode("".join(words)), starts


def test_labels_become_ids():
    dataset = encode_labelled([LabelledText("ab", "b"), LabelledText("d", "a")], encode_with_segments, ["a", "b"])
    assert [dataset[i]["label"].tolist() for i in range(2)] == [[1], [0]]
    assert dataset[0]["ids"].tolist() == encode("ab")
    assert dataset.lengths.tolist() == [[2], [1]]
    assert set(dataset[0]) == {"ids", "label"}


def test_a_pair_of_texts_has_segments():
    dataset = encode_labelled(
        [LabelledText("ab", "b", "xyz"), LabelledText("d", "a", "e")], encode_with_segments, ["a", "b"]
    )
    assert dataset[0]["ids"].tolist() == encode("abxyz")
    assert dataset[0]["segments"].tolist() == [0, 0, 1, 1, 1]
    assert dataset.lengths.tolist() == [[5], [2]], "segments are not counted as a text"


def test_the_first_token_of_a_word_has_its_label():
    dataset = encode_tagged([TaggedSentence(("abc", "d", "ef"), ("X", "O", "X"))], encode_words, ["O", "X"])
    assert dataset[0]["ids"].tolist() == encode("abcdef")
    assert dataset[0]["labels"].tolist() == [1, -100, -100, 0, 1, -100]


def test_invalid_rows_raise_one_line():
    with pytest.raises(InputError, match="longest=1"):
        encode_pairs([Pair("ab", "cd")], encode, encode, longest=1)
    with pytest.raises(InputError, match="'B-PRE' is not one of the 2 known labels; did you mean 'B-PER'"):
        encode_tagged([TaggedSentence(("a",), ("B-PRE",))], encode_words, ["O", "B-PER"])
