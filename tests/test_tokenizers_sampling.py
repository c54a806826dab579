"""Sub-word sampling: the library's own segmentation without chance, the stated distribution with it."""

import itertools
import math
from collections import Counter

import pytest
from test_tokenizers import TEXTS, odd_strings, trained

import monoblock as mb
from monoblock.tokenizers.sampling import BpeSegmenter, UnigramSegmenter, generator

FORMS = [None, "@@", "▁"]
WORDS = {"a": 0.3, "b": 0.2, "ab": 0.25, "ba": 0.15, "aba": 0.1}


@pytest.mark.parametrize("marker", FORMS)
def test_without_dropout_a_sample_is_the_encoding(marker):
    tokenizer = trained("bpe", marker)
    for text in [*odd_strings(1000), *TEXTS, "".join(TEXTS)]:
        assert tokenizer.sample(text, seed=1, dropout=0) == tokenizer.encode(text), text


def test_a_very_sharp_unigram_sample_is_the_encoding():
    tokenizer = trained("unigram", None)
    for text in [*odd_strings(500), *TEXTS]:
        assert tokenizer.sample(text, seed=1, alpha=1e5) == tokenizer.encode(text), text


@pytest.mark.parametrize(("kind", "marker"), [("bpe", None), ("bpe", "@@"), ("bpe", "▁"), ("unigram", None)])
def test_a_sample_depends_on_seed_epoch_index_and_text_alone(kind, marker):
    tokenizer = trained(kind, marker)
    text = TEXTS[1]

    def draw(**place):
        return tuple(tokenizer.sample(text, **({"seed": 3, "epoch": 2, "index": 5} | place)))

    first = draw()
    tokenizer.sample(TEXTS[0], seed=3)
    assert draw() == first
    for name in ("seed", "epoch", "index"):
        assert len({draw(**{name: value}) for value in range(11)}) > 1, name
    assert tokenizer.decode(first) == tokenizer.decode(tokenizer.encode(text))


def test_full_dropout_leaves_characters():
    tokenizer = trained("bpe", "▁")
    assert [tokenizer.token(number) for number in tokenizer.sample("the", seed=1, dropout=1)] == ["▁", "t", "h", "e"]


def test_a_dropped_merge_is_as_frequent_as_its_rate():
    model = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    draw = generator(1, 0, 0, "").random
    kept = sum(BpeSegmenter(model).segment("ab", 0.3, draw) == [2] for _ in range(10_000))
    assert abs(kept / 10_000 - 0.7) < 0.02


@pytest.mark.parametrize("alpha", [0.1, 1.0, 2.5])
def test_unigram_samples_follow_the_stated_distribution(alpha):
    model = {"vocab": [[piece, math.log(p)] for piece, p in WORDS.items()], "unk_id": None}
    pieces, word = list(WORDS), "abab"
    ways = {
        tuple(way): math.prod(WORDS[pieces[i]] for i in way) ** alpha
        for length in range(1, len(word) + 1)
        for way in itertools.product(range(len(pieces)), repeat=length)
        if "".join(pieces[i] for i in way) == word
    }
    draw = generator(1, 0, 0, "").random
    segmenter = UnigramSegmenter(model)
    seen = Counter(tuple(segmenter.segment(word, alpha, draw)) for _ in range(20_000))
    assert set(seen) == set(ways)
    for way, weight in ways.items():
        assert abs(seen[way] / 20_000 - weight / sum(ways.values())) < 0.015


def test_bytes_stand_in_for_unknown_characters_as_in_the_library():
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
            assert ours.segment(text, 1e5, generator(1, 0, 0, "").random) == library.encode(text).ids


@pytest.mark.parametrize(
    ("match", "kind", "options"),
    [
        ("needs bpe or unigram", "char", {}),
        ("write dropout=", "bpe", {"alpha": 0.1}),
        ("write alpha=", "unigram", {"dropout": 0.1}),
        ("from 0 to 1", "bpe", {"dropout": 1.5}),
        ("from 0", "unigram", {"alpha": float("nan")}),
    ],
)
def test_misuse_says_what_to_write(match, kind, options):
    with pytest.raises(mb.InputError, match=match):
        trained(kind, None).sample("the", seed=1, **options)
