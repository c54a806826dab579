"""Streamed text: whole characters only, together what the tokenizer makes of all tokens, and stop strings unseen."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from test_tokenizers import EVERY, SCALARS, odd_strings, trained

import monoblock as mb
from monoblock.decoding.text import Text

EMOJI = st.text(st.sampled_from("👩‍👩‍👧‍👦🇩🇪é́नमस्ते你 aé\n🤖"), max_size=23)
KINDS = [*EVERY, ("bytes in need", None)]


def fallen_back():
    """A tokenizer as LLaMA's: ▁ for spaces, and bytes for what is not in its vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "t", "h", "e", "▁t", "he"]
    specials = [{"id": n, "content": c, "special": True} for n, c in enumerate(pieces[:3])]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data = {
        "version": "1.0",
        "added_tokens": [row | plain for row in specials],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": [["▁", "t"], ["h", "e"]],
            "byte_fallback": True,
            "unk_token": "<unk>",
            "fuse_unk": True,
        },
    }
    return mb.Tokenizer.from_parts(data, {}, "made here")


_fallen = []


def tokenizer_of(kind, marker):
    if kind != "bytes in need":
        return trained(kind, marker)
    if not _fallen:
        _fallen.append(fallen_back())
    return _fallen[0]


def shown(tokenizer, ids, **options):
    """The parts a text is shown in, one a token and the last one."""
    text = Text(tokenizer, **options)
    return [*(text.add(token) for token in ids), text.end()]


@pytest.mark.parametrize(("kind", "marker"), KINDS)
@given(text=st.one_of(SCALARS, EMOJI))
@settings(max_examples=40, deadline=None)
def test_the_parts_put_together_are_the_text(kind, marker, text):
    tokenizer = tokenizer_of(kind, marker)
    ids = tokenizer.encode(text)
    parts = shown(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_so_they_are_for_tokens_that_no_text_would_become(kind, marker):
    """Whatever a model says: bytes that are no character, special tokens anywhere, pieces that fit nowhere."""
    tokenizer, chance = tokenizer_of(kind, marker), random.Random(3)
    for length in (1, 2, 3, 7, 20, 150) * 8:
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(length)]
        assert "".join(shown(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_neither_long_silence_nor_long_space_loses_what_was_before(kind, marker):
    """Special tokens are not shown, and spaces decide about spaces: a word long ago still counts."""
    tokenizer = tokenizer_of(kind, marker)
    word, space = tokenizer.encode("the"), tokenizer.encode("a     ")[-1]
    for between in (min(tokenizer.special_ids - {tokenizer.unk_id}), space):
        ids = word + [between] * 150 + word
        assert "".join(shown(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_no_part_ends_within_a_character(kind, marker):
    tokenizer = tokenizer_of(kind, marker)
    for text in odd_strings(60):
        ids = tokenizer.encode(text)
        if "\ufffd" not in tokenizer.decode(ids):
            assert not any("\ufffd" in part for part in shown(tokenizer, ids))


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_a_continuation_begins_where_its_prompt_ended(kind, marker):
    """With the space between them where there is one, and in the middle of a run of bytes."""
    tokenizer = tokenizer_of(kind, marker)
    for text in ("In the beginning God created the heaven and the earth. " * 9, "the 你好你好你好你好你好你好 then"):
        ids = tokenizer.encode(text)
        for cut in (1, 2, 5, *range(10, 40), len(ids) - 1):
            before, after = ids[:cut], ids[cut:]
            if tokenizer.decode(ids).startswith(tokenizer.decode(before)):  # else it ends within a character
                got = "".join(shown(tokenizer, after, after=before))
                assert tokenizer.decode(before) + got == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_text_is_not_held_back_longer_than_it_must_be(kind, marker):
    """After every token of plain words, all but what the next token may change is out."""
    tokenizer = tokenizer_of(kind, marker)
    ids = tokenizer.encode("the heat the hat ate " * 20)
    text, out = Text(tokenizer), ""
    for count, token in enumerate(ids, 1):
        out += text.add(token)
        assert out == tokenizer.decode(ids[:count]) or tokenizer_within_bytes(tokenizer, token)


def tokenizer_within_bytes(tokenizer, token):
    return tokenizer.token(token).startswith("<0x")


def test_an_emoji_of_many_bytes_comes_at_once():
    tokenizer = trained("byte", None)
    ids = tokenizer.encode("a🤖b")
    assert len(ids) == 6
    assert shown(tokenizer, ids) == ["a", "", "", "", "🤖", "b", ""]


def test_bytes_that_never_become_a_character_are_told_at_the_end():
    tokenizer = trained("byte", None)
    ids = tokenizer.encode("a🤖")[:3]
    assert shown(tokenizer, ids) == ["a", "", "", tokenizer.decode(ids)[1:]]


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "marker"), [k for k in EVERY if k[0] != "wordpiece"])
def test_a_stop_string_ends_the_text_and_is_not_shown(kind, marker):
    tokenizer = tokenizer_of(kind, marker)
    ids = tokenizer.encode("And the earth was without form, and void; and darkness was upon the deep.")
    whole = tokenizer.decode(ids)
    for stop in ("earth", "form, a", "void; and darkness", "w", " the"):
        text = Text(tokenizer, stop=["never said", stop])
        parts = [text.add(token) for token in ids] + [text.end()]
        assert "".join(parts) == whole[: whole.index(stop)]
        assert text.stopped == stop
        assert text.add(ids[0]) == ""


def test_what_may_be_the_beginning_of_a_stop_string_waits():
    tokenizer = trained("char", None)
    ids = tokenizer.encode("the heathen")
    assert shown(tokenizer, ids, stop="heaven") == ["t", "", "", "he ", "", "", "", "heat", "", "", "hen", ""]


def test_the_first_of_several_stop_strings_counts():
    tokenizer = trained("char", None)
    text = Text(tokenizer, stop=["deep", "ark", "darkness"])
    assert text.add(*tokenizer.encode("and darkness on the deep")) == "and "
    assert text.stopped == "darkness"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(mb.InputError, match="empty stop string"):
        Text(trained("char", None), stop="")
