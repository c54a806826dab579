"""Every kind of tokenizer: what is encoded comes back, what is unknown never crashes, what is special is asked for."""

import random

import pytest
from hypothesis import given, settings, strategies as st

import monoblock as mb
from monoblock.tokenizers.identity import check_belongs
from monoblock.tokenizers.specials import NEEDS, resolve

TEXTS = [
    "In the beginning God created the heaven and the earth.\n",
    "And the earth was without form, and void; and darkness was upon the face of the deep.\n",
    "यह एक छोटा सा वाक्य है। नमस्ते दुनिया, नमस्ते भारत।\n",
    "Grüße aus Köln: 1234 Äpfel, 56 Öfen.\n",
    "我们 今天 去 学校。\n",
    "don't do not, i'll — «quoted» (really?) x = y**2\n",
] * 3
EVERY = [
    ("char", None),
    ("byte", None),
    ("word", None),
    ("bpe", None),
    ("bpe", "@@"),
    ("bpe", "▁"),
    ("wordpiece", None),
    ("unigram", None),
]
LOSSLESS = [("byte", None), ("bpe", None)]
FORMS = ["causal", "masked", "spans"]
SCALARS = st.text(st.characters(exclude_categories=["Cs"]))
FEW_LETTERS = st.text(st.sampled_from("aehtnd नम्ते.,!⁇▁@#<>/w </s>\n\t x12३你Äß́'"))

_made = {}


def trained(kind, marker, **options):
    key = (kind, marker, *sorted(options.items()))
    if key not in _made:
        _made[key] = mb.Tokenizer.train(kind, TEXTS, 419, marker=marker, **options)
    return _made[key]


def odd_strings(count):
    """Strings of random scalar values, and those that break tokenizers."""
    chance = random.Random(7)
    known = [
        "",
        " ",
        "  a  ",
        "\n\n",
        "\x00\x01\x7f",
        "́a",
        "👩‍👩‍👧‍👦",
        "a\r\nb",
        "\u200d",
        "\ufeff",
        "\U0010ffff",
        "</w>",
        "@@ @@",
    ]
    pools = [
        (0x20, 0x7F),
        (0, 0x20),
        (0x300, 0x370),
        (0x900, 0x980),
        (0x1F300, 0x1FAFF),
        (0xE000, 0x110000),
        (1, 0xD800),
    ]
    for _ in range(count - len(known)):
        spans = [chance.choice(pools) for _ in range(chance.randrange(1, 4))]
        known.append("".join(chr(chance.randrange(*chance.choice(spans))) for _ in range(chance.randrange(23))))
    return known


# Round trips


@pytest.mark.parametrize(("kind", "marker"), LOSSLESS)
def test_byte_level_kinds_give_any_text_back(kind, marker):
    tokenizer = trained(kind, marker)
    texts = odd_strings(1000)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


@settings(max_examples=200, deadline=None)
@given(SCALARS)
def test_byte_level_kinds_give_any_text_hypothesis_thinks_of_back(text):
    for kind, marker in LOSSLESS:
        tokenizer = trained(kind, marker)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_after_one_round_ids_stay(kind, marker, lowercase):
    tokenizer = trained(kind, marker, lowercase=lowercase)
    for text in odd_strings(1000) + TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids, (text, tokenizer.decode(ids))


@settings(max_examples=300, deadline=None)
@given(st.one_of(FEW_LETTERS, SCALARS))
def test_after_one_round_ids_stay_for_whatever_hypothesis_thinks_of(text):
    for kind, marker in EVERY:
        tokenizer = trained(kind, marker)
        ids = tokenizer.encode(text)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids, (kind, marker, text)


@pytest.mark.parametrize(("kind", "marker"), [("char", None), ("bpe", "▁"), ("unigram", None)])
def test_known_characters_come_back_with_every_space(kind, marker):
    tokenizer = trained(kind, marker)
    for text in [*TEXTS, "  the  heaven ", " a", "\n the\n", "नमस्ते"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_unknown_characters_are_one_sign_each_or_bytes(kind, marker):
    tokenizer = trained(kind, marker)
    back = tokenizer.decode(tokenizer.encode("the ж end"))
    assert "ж" in back if tokenizer.unk_id is None else "⁇" in back


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_pieces_cover_the_text_they_name(kind, marker):
    tokenizer = trained(kind, marker)
    text = "the heaven"
    pieces = tokenizer.pieces(text)
    assert [piece.id for piece in pieces] == tokenizer.encode(text)
    assert [tokenizer.id(piece.piece) for piece in pieces] == [piece.id for piece in pieces]
    assert "".join(text[piece.start : piece.end] for piece in pieces).replace(" ", "") == "theheaven"


def test_each_marker_stands_where_its_authors_put_it():
    assert [piece.piece for piece in trained("bpe", "@@").pieces("zzthe")][-1].endswith("@@") is False
    assert all(piece.piece.endswith("@@") for piece in trained("bpe", "@@").pieces("Gott")[:-1])
    assert trained("bpe", "▁").pieces("the")[0].piece.startswith("▁")
    assert all(piece.piece.startswith("##") for piece in trained("wordpiece", None).pieces("heavenearth")[1:])


def test_vowel_signs_stay_with_their_word():
    for marker in (None, "▁"):
        tokenizer = trained("bpe", marker)
        assert len(tokenizer._words("नमस्ते दुनिया")) == 2


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_a_megabyte_of_one_character_takes_time_in_proportion(kind, marker):
    tokenizer = trained(kind, marker)
    for character in "a ^\u0301":
        assert len(tokenizer.encode(character * 200_000)) >= 0


# Sizes and ids


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_the_vocabulary_is_no_larger_than_asked_and_every_id_has_a_token(kind, marker):
    tokenizer = trained(kind, marker)
    assert tokenizer.vocab_size <= 419
    tokens = [tokenizer.token(number) for number in range(tokenizer.vocab_size)]
    assert [tokenizer.id(token) for token in tokens] == list(range(tokenizer.vocab_size))


def test_in_the_byte_kind_an_id_is_a_byte():
    assert trained("byte", None).encode("né") == list("né".encode())


def test_bytes_of_a_token_are_those_it_stands_for():
    tokenizer = trained("bpe", None)
    ids = tokenizer.encode("नमस्ते ж 👩‍👩‍👧")
    assert b"".join(tokenizer.bytes_of(number) for number in ids).decode() == "नमस्ते ж 👩‍👩‍👧"
    assert tokenizer.bytes_of(tokenizer.pad_id) is None
    assert trained("unigram", None).bytes_of(5) is None


@pytest.mark.parametrize("kind", ["word", "char"])
def test_a_small_vocabulary_keeps_the_frequent_ones(kind):
    tokenizer = mb.Tokenizer.train(kind, ["a a a b b c"], 3 + 1 + 2, min_frequency=2)
    assert [tokenizer.token(number) for number in range(tokenizer.vocab_size)][1:-3] == (
        ["a", "b"] if kind == "word" else [" ", "a"]
    )


# Special tokens


@pytest.mark.parametrize("specials", FORMS)
@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_text_that_spells_a_special_token_is_text_unless_it_may_be_one(kind, marker, specials):
    spelled = "x <pad> <s> </s> <mask>the<cls> <extra_id_0>"
    tokenizer = mb.Tokenizer.train(
        kind, [*TEXTS, *[spelled, spelled.upper()] * 9], 419, marker=marker, specials=specials
    )
    inside = set(tokenizer.encode(spelled)) - {tokenizer.unk_id}
    assert not inside & tokenizer.special_ids
    assert tokenizer.pad_id in tokenizer.encode(spelled, allow_specials=True)
    assert tokenizer.decode(tokenizer.encode("<pad>the", allow_specials=True)).strip() == "the"


def test_specials_are_chosen_by_what_a_model_needs():
    masked, spans = trained("wordpiece", None, specials="masked"), trained("unigram", None, specials="spans")
    assert (masked.bos_id, masked.eos_id) == (None, None)
    assert masked.encode("the", add_specials=True) == [masked.cls_id, *masked.encode("the"), masked.sep_id]
    assert spans.encode("the", add_specials=True)[-1] == spans.eos_id
    assert [spans.token(number) for number in spans.sentinel_ids[:2]] == ["<extra_id_0>", "<extra_id_1>"]
    assert len(spans.sentinel_ids) == 100
    causal = trained("bpe", None)
    assert causal.encode("", add_specials=True) == [causal.bos_id, causal.eos_id]
    assert (causal.unk_id, causal.mask_id) == (None, None)


def test_tags_and_a_number_of_sentinels_can_be_named():
    tokenizer = trained("bpe", "@@", specials=("pad", "eos", "sentinels=7", "<2hi>", "<BT>"))
    assert tokenizer.encode("<2hi>the", allow_specials=True)[0] == tokenizer.id("<2hi>")
    assert len(tokenizer.sentinel_ids) == 7
    assert tokenizer.decode([tokenizer.id("<BT>")], skip_specials=False) == "<BT>"


def test_a_need_is_made_of_roles():
    assert all(resolve(need) for need in NEEDS if need != "none")


# Belonging


def test_a_tokenizer_that_is_not_the_models_is_named_as_such():
    ours, other = trained("bpe", None), trained("bpe", None, lowercase=True)
    check_belongs(ours, ours.vocab_size, ours.fingerprint)
    check_belongs(ours, 512)  # embeddings are often padded
    with pytest.raises(mb.InputError, match=r"this tokenizer \(bpe, 419 tokens, \w{12}\) is not the one the model was"):
        check_belongs(ours, 419, other.fingerprint)
    with pytest.raises(mb.InputError, match="is not the model's, which knows 7 tokens"):
        check_belongs(ours, 7)


# Misuse


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (mb.ConfigError, "did you mean 'bpe'", lambda: mb.Tokenizer.train("bpee", TEXTS)),
        (mb.ConfigError, "bpe takes '@@'", lambda: mb.Tokenizer.train("char", TEXTS, marker="@@")),
        (mb.ConfigError, "bpe takes '@@'", lambda: mb.Tokenizer.train("bpe", TEXTS, marker="##")),
        (mb.ConfigError, "needs 259", lambda: mb.Tokenizer.train("bpe", TEXTS, 100)),
        (mb.ConfigError, "from 1", lambda: mb.Tokenizer.train("bpe", TEXTS, -1)),
        (mb.ConfigError, "did you mean 'masked'", lambda: mb.Tokenizer.train("bpe", TEXTS, specials="maskd")),
        (mb.ConfigError, "no special token", lambda: mb.Tokenizer.train("bpe", TEXTS, specials=["2hi"])),
        (mb.ConfigError, "no number of sentinels", lambda: mb.Tokenizer.train("bpe", TEXTS, specials=["sentinels=x"])),
        (mb.InputError, "one string", lambda: mb.Tokenizer.train("bpe", "text")),
        (mb.InputError, "no text", lambda: mb.Tokenizer.train("bpe", [])),
        (mb.InputError, "is a int", lambda: mb.Tokenizer.train("bpe", ["a", 5])),
        (mb.InputError, "half a surrogate pair", lambda: mb.Tokenizer.train("bpe", ["\ud800"])),
        (mb.InputError, r"U\+D800 at 1", lambda: trained("bpe", None).encode("a\ud800")),
        (mb.InputError, "is a NoneType", lambda: trained("bpe", None).encode(None)),
        (mb.InputError, "text 1 is a bytes", lambda: trained("bpe", None).encode_batch(["a", b"b"])),
        (mb.InputError, "one string", lambda: trained("bpe", None).encode_batch("ab")),
        (mb.InputError, "its ids are 0 to 418", lambda: trained("bpe", None).decode([419])),
        (mb.InputError, "its ids are 0 to 418", lambda: trained("bpe", None).decode([-1])),
        (mb.InputError, "one sequence at a time", lambda: trained("bpe", None).decode([[1], [2]])),
        (mb.InputError, "its ids are", lambda: trained("bpe", None).token(10**12)),
        (mb.InputError, "did you mean '<pad>'", lambda: trained("bpe", None).id("<padd>")),
    ],
)
def test_misuse_is_one_line_that_says_what_to_write(error, match, call):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_ids_may_come_as_a_tensor():
    import torch

    tokenizer = trained("bpe", None)
    assert tokenizer.decode(torch.tensor(tokenizer.encode("the earth"))) == "the earth"
