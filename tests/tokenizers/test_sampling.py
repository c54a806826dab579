"""Subword sampling: without dropout the library's segmentation, with it the stated distribution."""

import itertools
import math
from collections import Counter

import pytest
from tokenizer_support import TEXTS, get_tokenizer, random_strings

import monoblock as mb
from monoblock.tokenizers.sampling import BpeSegmenter, UnigramSegmenter, seeded_random

MARKERS = [None, "@@", "▁"]
PROBABILITIES = {"a": 0.3, "b": 0.2, "ab": 0.25, "ba": 0.15, "aba": 0.1}


@pytest.mark.parametrize("marker", MARKERS)
def test_without_dropout_a_sample_is_the_encoding(marker):
    tokenizer = get_tokenizer("bpe", marker)
    for text in [*random_strings(1000), *TEXTS, "".join(TEXTS)]:
        assert tokenizer.sample(text, seed=1, dropout=0) == tokenizer.encode(text), text


def test_a_very_sharp_unigram_sample_is_the_encoding():
    tokenizer = get_tokenizer("unigram", None)
    for text in [*random_strings(500), *TEXTS]:
        assert tokenizer.sample(text, seed=1, alpha=1e5) == tokenizer.encode(text), text


@pytest.mark.parametrize(("kind", "marker"), [("bpe", None), ("bpe", "@@"), ("bpe", "▁"), ("unigram", None)])
def test_a_sample_depends_on_seed_epoch_index_and_text_alone(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    text = TEXTS[1]

    def sample(**key):
        return tuple(tokenizer.sample(text, **({"seed": 3, "epoch": 2, "index": 5} | key)))

    first = sample()
    tokenizer.sample(TEXTS[0], seed=3)
    assert sample() == first
    for name in ("seed", "epoch", "index"):
        assert len({sample(**{name: value}) for value in range(11)}) > 1, name
    assert tokenizer.decode(first) == tokenizer.decode(tokenizer.encode(text))


def test_full_dropout_leaves_characters():
    tokenizer = get_tokenizer("bpe", "▁")
    assert [tokenizer.token(number) for number in tokenizer.sample("the", seed=1, dropout=1)] == ["▁", "t", "h", "e"]


def test_a_dropped_merge_is_as_frequent_as_its_rate():
    model = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    draw = seeded_random(1, 0, 0, "").random
    kept = sum(BpeSegmenter(model).segment("ab", 0.3, draw) == [2] for _ in range(10_000))
    assert abs(kept / 10_000 - 0.7) < 0.02


@pytest.mark.parametrize("alpha", [0.1, 1.0, 2.5])
def test_unigram_samples_follow_the_stated_distribution(alpha):
    model = {"vocab": [[piece, math.log(p)] for piece, p in PROBABILITIES.items()], "unk_id": None}
    pieces, word = list(PROBABILITIES), "abab"
    weights = {
        tuple(ids): math.prod(PROBABILITIES[pieces[i]] for i in ids) ** alpha
        for length in range(1, len(word) + 1)
        for ids in itertools.product(range(len(pieces)), repeat=length)
        if "".join(pieces[i] for i in ids) == word
    }
    draw = seeded_random(1, 0, 0, "").random
    segmenter = UnigramSegmenter(model)
    counts = Counter(tuple(segmenter.segment(word, alpha, draw)) for _ in range(20_000))
    assert set(counts) == set(weights)
    for ids, weight in weights.items():
        assert abs(counts[ids] / 20_000 - weight / sum(weights.values())) < 0.015


def test_byte_fallback_matches_the_library():
    from tokenizers import Tokenizer, models

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257, "b": 258, "ab": 259}
    for fuse in (False, True):
        options = {"merges": [("a", "b")], "unk_token": "<unk>", "fuse_unk": fuse}
        for fallback in (False, True):
            library = Tokenizer(models.BPE(vocab=vocab, byte_fallback=fallback, **options))
            ours = BpeSegmenter({"vocab": vocab, "byte_fallback": fallback, **options, "merges": [["a", "b"]]})
            for text in ("abжжab", "жa\U0010ffff", "ba"):
                assert ours.segment(text, 0, float) == library.encode(text).ids
    scored = [(piece, -float(number % 7) - 1) for piece, number in vocab.items()]
    for fallback in (False, True):
        library = Tokenizer(models.Unigram(scored, 256, fallback))
        ours = UnigramSegmenter({"vocab": scored, "unk_id": 256, "byte_fallback": fallback})
        for text in ("abжжab", "жa\U0010ffff", "ba"):
            assert ours.segment(text, 1e5, seeded_random(1, 0, 0, "").random) == library.encode(text).ids


@pytest.mark.parametrize(
    ("match", "kind", "options"),
    [
        ("needs bpe or unigram", "char", {}),
        ("set dropout instead", "bpe", {"alpha": 0.1}),
        ("set alpha instead", "unigram", {"dropout": 0.1}),
        ("from 0 to 1", "bpe", {"dropout": 1.5}),
        ("from 0", "unigram", {"alpha": float("nan")}),
    ],
)
def test_misuse_names_the_right_argument(match, kind, options):
    with pytest.raises(mb.InputError, match=match):
        get_tokenizer(kind, None).sample("the", seed=1, **options)
