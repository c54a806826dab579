"""Noise for back-translated sources, and the corpus of reversed letters."""

from random import Random

import pytest
from hypothesis import given, strategies as st

from monoblock.data.corpora import load
from monoblock.data.noise import BLANK, DISTANCE, KINDS, blank, drop, noised, permutation
from monoblock.errors import InputError

WORDS = [f"w{n}" for n in range(200)]
TEXT = " ".join(WORDS)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 5))
def test_no_word_moves_further_than_the_distance(seed, count, distance):
    words = list(range(count))
    moved = permutation(words, Random(seed), distance)
    assert sorted(moved) == words
    assert all(abs(place - word) <= distance for place, word in enumerate(moved))


def test_words_do_move_as_far_as_they_may():
    far = {abs(place - word) for seed in range(50) for place, word in enumerate(permutation(range(30), Random(seed)))}
    assert far == set(range(DISTANCE + 1))


def test_about_a_tenth_is_dropped_and_about_a_tenth_blanked():
    dropped = [word for n in range(50) for word in drop(WORDS, Random(n))]
    blanked = [word for n in range(50) for word in blank(WORDS, Random(n))]
    assert 0.88 < len(dropped) / (50 * len(WORDS)) < 0.92
    assert 0.08 < blanked.count(BLANK) / len(blanked) < 0.12
    assert len(blanked) == 50 * len(WORDS)


@pytest.mark.parametrize("words", [["alone"], ["one", "two"]])
def test_something_is_always_left(words):
    assert all(drop(words, Random(n), 0.99) for n in range(300))
    assert drop([], Random(1)) == []


def test_noise_is_a_function_of_seed_and_line():
    assert noised(TEXT, KINDS, seed=3, number=5) == noised(TEXT, KINDS, seed=3, number=5)
    assert noised(TEXT, KINDS, seed=3, number=5) != noised(TEXT, KINDS, seed=3, number=6)
    assert noised(TEXT, KINDS, seed=4, number=5) != noised(TEXT, KINDS, seed=3, number=5)
    assert noised(TEXT, (), seed=3, number=5) == TEXT


def test_a_kind_does_the_same_alone_and_together():
    one_by_one = noised(TEXT, ["drop"], seed=1, number=2)
    one_by_one = noised(one_by_one, ["blank"], seed=1, number=2)
    one_by_one = noised(one_by_one, ["permutation"], seed=1, number=2)
    assert noised(TEXT, ["permutation", "drop", "blank"], seed=1, number=2) == one_by_one


def test_a_noise_that_is_none_is_refused():
    with pytest.raises(InputError, match="did you mean 'permutation'"):
        noised("a b", ["permutations"], seed=1, number=1)


def test_reversed_letters_are_reversed_and_no_string_is_in_two_splits():
    found = {split: load("reverse", split) for split in ("train", "valid", "test")}
    for corpus in found.values():
        assert all(row.target == row.source[::-1] for row in corpus)
        assert {len(row.source.split()) for row in corpus} == set(range(2, 17))
    held = [row.source for split in ("valid", "test") for row in found[split]]
    assert len(set(held)) == len(held) == 3_000
    assert set(held).isdisjoint(row.source for row in found["train"])
