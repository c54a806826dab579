"""Noise for back-translated sources, and the corpus of reversed letters."""

from random import Random

import pytest
from hypothesis import given, strategies as st

from monoblock.data.corpora.load import load_corpus
from monoblock.data.noise import (
    BLANK_TOKEN,
    MAX_DISTANCE,
    NOISE_FUNCTIONS,
    add_noise,
    blank_words,
    drop_words,
    shuffle_words,
)
from monoblock.errors import InputError

WORDS = [f"w{n}" for n in range(200)]
TEXT = " ".join(WORDS)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 5))
def test_no_word_moves_further_than_the_distance(seed, count, distance):
    words = list(range(count))
    shuffled = shuffle_words(words, Random(seed), distance)
    assert sorted(shuffled) == words
    assert all(abs(index - word) <= distance for index, word in enumerate(shuffled))


def test_words_move_up_to_the_maximal_distance():
    shuffled = [shuffle_words(range(30), Random(seed)) for seed in range(50)]
    distances = {abs(index - word) for words in shuffled for index, word in enumerate(words)}
    assert distances == set(range(MAX_DISTANCE + 1))


def test_about_a_tenth_is_dropped_and_about_a_tenth_blanked():
    dropped = [word for n in range(50) for word in drop_words(WORDS, Random(n))]
    blanked = [word for n in range(50) for word in blank_words(WORDS, Random(n))]
    assert 0.88 < len(dropped) / (50 * len(WORDS)) < 0.92
    assert 0.08 < blanked.count(BLANK_TOKEN) / len(blanked) < 0.12
    assert len(blanked) == 50 * len(WORDS)


@pytest.mark.parametrize("words", [["alone"], ["one", "two"]])
def test_at_least_one_word_is_kept(words):
    assert all(drop_words(words, Random(n), 0.99) for n in range(300))
    assert drop_words([], Random(1)) == []


def test_noise_is_a_function_of_seed_and_line():
    expected = add_noise(TEXT, NOISE_FUNCTIONS, seed=3, line_number=5)
    assert add_noise(TEXT, NOISE_FUNCTIONS, seed=3, line_number=5) == expected
    assert add_noise(TEXT, NOISE_FUNCTIONS, seed=3, line_number=6) != expected
    assert add_noise(TEXT, NOISE_FUNCTIONS, seed=4, line_number=5) != expected
    assert add_noise(TEXT, (), seed=3, line_number=5) == TEXT


def test_a_kind_does_the_same_alone_and_combined():
    stepwise = add_noise(TEXT, ["drop"], seed=1, line_number=2)
    stepwise = add_noise(stepwise, ["blank"], seed=1, line_number=2)
    stepwise = add_noise(stepwise, ["permutation"], seed=1, line_number=2)
    assert add_noise(TEXT, ["permutation", "drop", "blank"], seed=1, line_number=2) == stepwise


def test_an_unknown_noise_is_rejected():
    with pytest.raises(InputError, match="did you mean 'permutation'"):
        add_noise("a b", ["permutations"], seed=1, line_number=1)


def test_reversed_letters_are_reversed_and_no_string_is_in_two_splits():
    splits = {split: load_corpus("reverse", split) for split in ("train", "valid", "test")}
    for corpus in splits.values():
        assert all(row.target == row.source[::-1] for row in corpus)
        assert {len(row.source.split()) for row in corpus} == set(range(2, 17))
    held_out = [row.source for split in ("valid", "test") for row in splits[split]]
    assert len(set(held_out)) == len(held_out) == 3_000
    assert set(held_out).isdisjoint(row.source for row in splits["train"])
