"""Every kind of tokenizer: round trips, unknown text, special tokens, and errors of one line."""

import pytest
from hypothesis import given, settings, strategies as st
from tokenizer_support import FEW_LETTERS, KINDS, LOSSLESS, OBJECTIVES, SCALARS, TEXTS, get_tokenizer, random_strings

import monoblock as mb
from monoblock.tokenizers.compatibility import check_tokenizer_fits
from monoblock.tokenizers.special_tokens import ROLES_BY_OBJECTIVE, resolve_special_tokens

# Round trips


@pytest.mark.parametrize(("kind", "marker"), LOSSLESS)
def test_byte_level_tokenizers_are_lossless(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    texts = random_strings(1000)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


@settings(max_examples=200, deadline=None)
@given(SCALARS)
def test_byte_level_tokenizers_are_lossless_for_any_text_of_hypothesis(text):
    for kind, marker in LOSSLESS:
        tokenizer = get_tokenizer(kind, marker)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_a_long_text_has_the_ids_of_its_words_as_a_short_one(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    words = " ".join(TEXTS)
    for options in ({}, {"add_specials": True}, {"allow_specials": True}):
        short = tokenizer._select_backend("allow_specials" in options)
        text = words * (1 + 5000 // len(words))
        expected = short.encode(text, add_special_tokens="add_specials" in options).ids
        assert tokenizer.encode(text, **options) == expected


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_ids_are_stable_after_one_round_trip(kind, marker, lowercase):
    tokenizer = get_tokenizer(kind, marker, lowercase=lowercase)
    for text in random_strings(1000) + TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids, (text, tokenizer.decode(ids))


@settings(max_examples=300, deadline=None)
@given(st.one_of(FEW_LETTERS, SCALARS))
def test_ids_are_stable_after_one_round_trip_for_any_text_of_hypothesis(text):
    for kind, marker in KINDS:
        tokenizer = get_tokenizer(kind, marker)
        ids = tokenizer.encode(text)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids, (kind, marker, text)


@pytest.mark.parametrize(("kind", "marker"), [("char", None), ("bpe", "▁"), ("unigram", None)])
def test_known_characters_and_spaces_are_restored(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    for text in [*TEXTS, "  the  heaven ", " a", "\n the\n", "नमस्ते"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_unknown_characters_become_the_unknown_character_or_bytes(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    decoded = tokenizer.decode(tokenizer.encode("the ж end"))
    assert "ж" in decoded if tokenizer.unk_id is None else "⁇" in decoded


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_pieces_cover_their_text(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    text = "the heaven"
    pieces = tokenizer.pieces(text)
    assert [piece.id for piece in pieces] == tokenizer.encode(text)
    assert [tokenizer.id(piece.piece) for piece in pieces] == [piece.id for piece in pieces]
    assert "".join(text[piece.start : piece.end] for piece in pieces).replace(" ", "") == "theheaven"


def test_each_marker_is_on_the_published_side():
    assert [piece.piece for piece in get_tokenizer("bpe", "@@").pieces("zzthe")][-1].endswith("@@") is False
    assert all(piece.piece.endswith("@@") for piece in get_tokenizer("bpe", "@@").pieces("Gott")[:-1])
    assert get_tokenizer("bpe", "▁").pieces("the")[0].piece.startswith("▁")
    assert all(piece.piece.startswith("##") for piece in get_tokenizer("wordpiece", None).pieces("heavenearth")[1:])


def test_vowel_signs_stay_with_their_word():
    for marker in (None, "▁"):
        tokenizer = get_tokenizer("bpe", marker)
        assert len(tokenizer._pre_tokenize("नमस्ते दुनिया")) == 2


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_long_runs_of_one_character_take_linear_time(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    for character in "a ^\u0301":
        assert len(tokenizer.encode(character * 200_000)) >= 0


# Sizes and ids


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_the_vocabulary_has_at_most_the_given_size_and_every_id_has_a_token(kind, marker):
    tokenizer = get_tokenizer(kind, marker)
    assert tokenizer.vocab_size <= 419
    tokens = [tokenizer.token(number) for number in range(tokenizer.vocab_size)]
    assert [tokenizer.id(token) for token in tokens] == list(range(tokenizer.vocab_size))


def test_the_ids_of_a_byte_tokenizer_are_bytes():
    assert get_tokenizer("byte", None).encode("né") == list("né".encode())


def test_token_bytes_join_to_the_text():
    tokenizer = get_tokenizer("bpe", None)
    ids = tokenizer.encode("नमस्ते ж 👩‍👩‍👧")
    assert b"".join(tokenizer.token_bytes(number) for number in ids).decode() == "नमस्ते ж 👩‍👩‍👧"
    assert tokenizer.token_bytes(tokenizer.pad_id) is None
    assert get_tokenizer("unigram", None).token_bytes(5) is None


@pytest.mark.parametrize("kind", ["word", "char"])
def test_a_small_vocabulary_keeps_the_most_frequent(kind):
    tokenizer = mb.Tokenizer.train(kind, ["a a a b b c"], 3 + 1 + 2, min_frequency=2)
    assert [tokenizer.token(number) for number in range(tokenizer.vocab_size)][1:-3] == (
        ["a", "b"] if kind == "word" else [" ", "a"]
    )


# Special tokens


@pytest.mark.parametrize("specials", OBJECTIVES)
@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_text_that_spells_a_special_token_is_plain_text_unless_allowed(kind, marker, specials):
    spelling = "x <pad> <s> </s> <mask>the<cls> <extra_id_0>"
    tokenizer = mb.Tokenizer.train(
        kind, [*TEXTS, *[spelling, spelling.upper()] * 9], 419, marker=marker, specials=specials
    )
    ids = set(tokenizer.encode(spelling)) - {tokenizer.unk_id}
    assert not ids & tokenizer.special_ids
    assert tokenizer.pad_id in tokenizer.encode(spelling, allow_specials=True)
    assert tokenizer.decode(tokenizer.encode("<pad>the", allow_specials=True)).strip() == "the"


def test_special_tokens_are_chosen_by_objective():
    masked, spans = (
        get_tokenizer("wordpiece", None, specials="masked_lm"),
        get_tokenizer("unigram", None, specials="span_corruption"),
    )
    assert (masked.bos_id, masked.eos_id) == (None, None)
    assert masked.encode("the", add_specials=True) == [masked.cls_id, *masked.encode("the"), masked.sep_id]
    assert spans.encode("the", add_specials=True)[-1] == spans.eos_id
    assert [spans.token(number) for number in spans.sentinel_ids[:2]] == ["<extra_id_0>", "<extra_id_1>"]
    assert len(spans.sentinel_ids) == 100
    causal = get_tokenizer("bpe", None)
    assert causal.encode("", add_specials=True) == [causal.bos_id, causal.eos_id]
    assert (causal.unk_id, causal.mask_id) == (None, None)


def test_tags_and_a_number_of_sentinels_can_be_given():
    tokenizer = get_tokenizer("bpe", "@@", specials=("pad", "eos", "sentinels=7", "<2hi>", "<BT>"))
    assert tokenizer.encode("<2hi>the", allow_specials=True)[0] == tokenizer.id("<2hi>")
    assert len(tokenizer.sentinel_ids) == 7
    assert tokenizer.decode([tokenizer.id("<BT>")], skip_specials=False) == "<BT>"


def test_every_objective_has_roles():
    assert all(resolve_special_tokens(objective) for objective in ROLES_BY_OBJECTIVE if objective != "none")


# Compatibility


def test_a_tokenizer_of_another_model_is_rejected():
    ours, other = get_tokenizer("bpe", None), get_tokenizer("bpe", None, lowercase=True)
    check_tokenizer_fits(ours, ours.vocab_size, ours.fingerprint)
    check_tokenizer_fits(ours, 512)  # embeddings are often padded
    with pytest.raises(mb.InputError, match=r"this tokenizer \(bpe, 419 tokens, \w{12}\) is not the one the model was"):
        check_tokenizer_fits(ours, 419, other.fingerprint)
    with pytest.raises(mb.InputError, match="has more tokens than the model, which has 7"):
        check_tokenizer_fits(ours, 7)


# Misuse


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (mb.ConfigError, "did you mean 'bpe'", lambda: mb.Tokenizer.train("bpee", TEXTS)),
        (mb.ConfigError, "bpe takes '@@'", lambda: mb.Tokenizer.train("char", TEXTS, marker="@@")),
        (mb.ConfigError, "bpe takes '@@'", lambda: mb.Tokenizer.train("bpe", TEXTS, marker="##")),
        (mb.ConfigError, "with these specials needs 259", lambda: mb.Tokenizer.train("bpe", TEXTS, 100)),
        (mb.ConfigError, "from 1", lambda: mb.Tokenizer.train("bpe", TEXTS, -1)),
        (mb.ConfigError, "did you mean 'masked_lm'", lambda: mb.Tokenizer.train("bpe", TEXTS, specials="maskd_lm")),
        (mb.ConfigError, "not a special token", lambda: mb.Tokenizer.train("bpe", TEXTS, specials=["2hi"])),
        (
            mb.ConfigError,
            "not a number of sentinels",
            lambda: mb.Tokenizer.train("bpe", TEXTS, specials=["sentinels=x"]),
        ),
        (mb.InputError, "one string", lambda: mb.Tokenizer.train("bpe", "text")),
        (mb.InputError, "no text", lambda: mb.Tokenizer.train("bpe", [])),
        (mb.InputError, "is a int", lambda: mb.Tokenizer.train("bpe", ["a", 5])),
        (mb.InputError, "half a surrogate pair", lambda: mb.Tokenizer.train("bpe", ["\ud800"])),
        (mb.InputError, r"U\+D800 at 1", lambda: get_tokenizer("bpe", None).encode("a\ud800")),
        (mb.InputError, "is a NoneType", lambda: get_tokenizer("bpe", None).encode(None)),
        (mb.InputError, "text 1 is a bytes", lambda: get_tokenizer("bpe", None).encode_batch(["a", b"b"])),
        (mb.InputError, "one string", lambda: get_tokenizer("bpe", None).encode_batch("ab")),
        (mb.InputError, "its ids are 0 to 418", lambda: get_tokenizer("bpe", None).decode([419])),
        (mb.InputError, "its ids are 0 to 418", lambda: get_tokenizer("bpe", None).decode([-1])),
        (mb.InputError, "one sequence at a time", lambda: get_tokenizer("bpe", None).decode([[1], [2]])),
        (mb.InputError, "its ids are", lambda: get_tokenizer("bpe", None).token(10**12)),
        (mb.InputError, "did you mean '<pad>'", lambda: get_tokenizer("bpe", None).id("<padd>")),
    ],
)
def test_misuse_raises_one_line_with_a_fix(error, match, call):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_ids_may_be_a_tensor():
    import torch

    tokenizer = get_tokenizer("bpe", None)
    assert tokenizer.decode(torch.tensor(tokenizer.encode("the earth"))) == "the earth"
