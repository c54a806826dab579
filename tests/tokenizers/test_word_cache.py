"""Encoding with a cache of words gives the ids of `Tokenizer.encode`, for every pre-tokenizer that is divided."""

import random
from functools import partial

import numpy as np
import pytest

from monoblock.tokenizers.components import byte_level, component_sequence, split_regex
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.tokenizers.word_cache import RULE_BY_PATTERN, BulkEncoder, split_words

DTYPE = np.dtype("<u2")
CHARACTERS = [
    *"ab'sT.,!1_/é中\u0301\u00a0\u3000\u0085\x1c\x1f",
    "\n",
    "\n",
    " ",
    " ",
    "\t",
    "\r\n",
    "</s>",
    " don't",
    "\n\n\n",
]
SIMPLE = [*"abT.,!1'é中", " ", " ", "\n", " the", "\n\n", " \n"]


def random_texts(characters, count=600, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choice(characters) for _ in range(rng.randrange(40))) for _ in range(count)]


# Runs of white space and of punctuation become tokens, so that a wrong cut changes the ids.
TRAINING = random_texts([*CHARACTERS, *SIMPLE], 1000, seed=1)


def with_pattern(pattern, normalizer=None):
    """A byte-level BPE tokenizer with merges of its own, split by a published pattern."""
    sections, config = Tokenizer.train("bpe", TRAINING, 700).content()
    pre_tokenizer = component_sequence("pretokenizers", split_regex(pattern), byte_level())
    return Tokenizer({**sections, "pre_tokenizer": pre_tokenizer, "normalizer": normalizer}, config)


def gpt2_style():
    data, config = Tokenizer.train("bpe", TRAINING, 700).content()
    return Tokenizer({**data, "pre_tokenizer": byte_level(use_regex=True)}, config)


TOKENIZERS = {f"pattern {number}": partial(with_pattern, pattern) for number, pattern in enumerate(RULE_BY_PATTERN)} | {
    "NFC": partial(with_pattern, next(iter(RULE_BY_PATTERN)), {"type": "NFC"}),
    "GPT-2": gpt2_style,
    "word": partial(Tokenizer.train, "word", TRAINING, 700),
    "bpe @@": partial(Tokenizer.train, "bpe", TRAINING, 300, marker="@@"),
}


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("characters", [CHARACTERS, SIMPLE], ids=["any", "simple"])
def test_the_ids_are_those_of_encode(build, characters):
    tokenizer = build()
    encode = BulkEncoder(tokenizer, DTYPE)
    assert encode.rule is not None
    texts = random_texts(characters)
    for _ in range(2):  # the second time from the cache
        for text, ids in zip(texts, encode(texts), strict=True):
            assert np.frombuffer(ids, DTYPE).tolist() == tokenizer.encode(text), repr(text)
    assert any(len(split_words(text, encode.rule)) > 5 for text in texts)


@pytest.mark.parametrize("kind", ["char", "byte", "unigram", "wordpiece"])
def test_other_tokenizers_encode_whole_texts(kind):
    tokenizer = Tokenizer.train(kind, TRAINING[:300], 400)
    encode, texts = BulkEncoder(tokenizer, DTYPE), random_texts(CHARACTERS, 200)
    assert encode.rule is None
    assert [np.frombuffer(ids, DTYPE).tolist() for ids in encode(texts)] == tokenizer.encode_batch(texts)


def test_added_tokens_that_are_found_in_text_prevent_the_division():
    data, config = Tokenizer.train("bpe", TRAINING, 400).content()
    row = {**data["added_tokens"][0], "id": 400, "content": "a b", "special": False}
    assert BulkEncoder(Tokenizer({**data, "added_tokens": [*data["added_tokens"], row]}, config), DTYPE).rule is None


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr("monoblock.tokenizers.word_cache.MAX_CACHED_WORDS", 50)
    encode = BulkEncoder(Tokenizer.train("bpe", TRAINING, 400), DTYPE)
    for number in range(40):
        encode([" ".join(f"w{number}x{index}" for index in range(10))])
        assert len(encode._cache) <= 60
    encode(["z" * 1000])
    assert "z" * 1000 not in encode._cache
