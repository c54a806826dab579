"""Streamed text: complete characters only, equal to what the tokenizer decodes at once, and without stop strings."""

import functools
import random

import pytest
from hypothesis import given, settings, strategies as st
from tokenizer_support import KINDS, SCALARS, get_tokenizer, random_strings

import monoblock as mb
from monoblock.inference.streaming_text import StreamingText

EMOJI = st.text(st.sampled_from("👩‍👩‍👧‍👦🇩🇪é́नमस्ते你 aé\n🤖"), max_size=23)
ALL_KINDS = [*KINDS, ("byte fallback", None)]


@functools.cache
def byte_fallback_tokenizer():
    """A tokenizer like LLaMA's: ▁ for spaces, and bytes for characters outside the vocabulary."""
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
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [["▁", "t"], ["h", "e"]],
            "byte_fallback": True,
            "unk_token": "<unk>",
            "fuse_unk": True,
        },
    }
    return mb.Tokenizer.from_content(data, {}, "test")


def make_tokenizer(kind, marker):
    return byte_fallback_tokenizer() if kind == "byte fallback" else get_tokenizer(kind, marker)


def stream_parts(tokenizer, ids, **options):
    """The text emitted after each token and at the end."""
    text = StreamingText(tokenizer, **options)
    return [*(text.add(token) for token in ids), text.finish()]


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
@given(text=st.one_of(SCALARS, EMOJI))
@settings(max_examples=40, deadline=None)
def test_the_emitted_parts_concatenate_to_the_decoded_text(kind, marker, text):
    tokenizer = make_tokenizer(kind, marker)
    ids = tokenizer.encode(text)
    parts = stream_parts(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
def test_random_tokens_stream_to_their_decoded_text(kind, marker):
    """As a model may generate them: bytes that form no character, special tokens anywhere, pieces in any order."""
    tokenizer, rng = make_tokenizer(kind, marker), random.Random(3)
    for length in (1, 2, 3, 7, 20, 150) * 8:
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(length)]
        assert "".join(stream_parts(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
def test_long_runs_of_special_tokens_or_spaces_do_not_lose_the_context(kind, marker):
    """Special tokens are not decoded, and a leading space depends on whether a word came before it."""
    tokenizer = make_tokenizer(kind, marker)
    word, space = tokenizer.encode("the"), tokenizer.encode("a     ")[-1]
    for filler in (min(tokenizer.special_ids - {tokenizer.unk_id}), space):
        ids = word + [filler] * 150 + word
        assert "".join(stream_parts(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
def test_no_part_ends_inside_a_character(kind, marker):
    tokenizer = make_tokenizer(kind, marker)
    for text in random_strings(60):
        ids = tokenizer.encode(text)
        if "\ufffd" not in tokenizer.decode(ids):
            assert not any("\ufffd" in part for part in stream_parts(tokenizer, ids))


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
def test_a_continuation_begins_where_its_prompt_ended(kind, marker):
    """Including the space between them, and inside a run of bytes."""
    tokenizer = make_tokenizer(kind, marker)
    for text in ("In the beginning God created the heaven and the earth. " * 9, "the 你好你好你好你好你好你好 then"):
        ids = tokenizer.encode(text)
        for cut in (1, 2, 5, *range(10, 40), len(ids) - 1):
            prompt, new = ids[:cut], ids[cut:]
            if tokenizer.decode(ids).startswith(tokenizer.decode(prompt)):  # otherwise it ends inside a character
                continuation = "".join(stream_parts(tokenizer, new, context_ids=prompt))
                assert tokenizer.decode(prompt) + continuation == tokenizer.decode(ids)


@pytest.mark.parametrize(("kind", "marker"), ALL_KINDS)
def test_text_is_emitted_as_soon_as_it_is_final(kind, marker):
    """After every token of plain words, everything that the next token cannot change."""
    tokenizer = make_tokenizer(kind, marker)
    ids = tokenizer.encode("the heat the hat ate " * 20)
    text, emitted = StreamingText(tokenizer), ""
    for count, token in enumerate(ids, 1):
        emitted += text.add(token)
        assert emitted == tokenizer.decode(ids[:count]) or tokenizer.token(token).startswith("<0x")


def test_an_emoji_of_many_bytes_is_emitted_at_once():
    tokenizer = get_tokenizer("byte", None)
    ids = tokenizer.encode("a🤖b")
    assert len(ids) == 6
    assert stream_parts(tokenizer, ids) == ["a", "", "", "", "🤖", "b", ""]


def test_bytes_that_never_form_a_character_are_emitted_at_the_end():
    tokenizer = get_tokenizer("byte", None)
    ids = tokenizer.encode("a🤖")[:3]
    assert stream_parts(tokenizer, ids) == ["a", "", "", tokenizer.decode(ids)[1:]]


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "marker"), [row for row in KINDS if row[0] != "wordpiece"])
def test_a_stop_string_ends_the_text_and_is_not_emitted(kind, marker):
    tokenizer = make_tokenizer(kind, marker)
    ids = tokenizer.encode("And the earth was without form, and void; and darkness was upon the deep.")
    full_text = tokenizer.decode(ids)
    for stop in ("earth", "form, a", "void; and darkness", "w", " the"):
        text = StreamingText(tokenizer, stop=["absent", stop])
        parts = [text.add(token) for token in ids] + [text.finish()]
        assert "".join(parts) == full_text[: full_text.index(stop)]
        assert text.matched_stop == stop
        assert text.add(ids[0]) == ""


def test_the_possible_beginning_of_a_stop_string_is_held_back():
    tokenizer = get_tokenizer("char", None)
    ids = tokenizer.encode("the heathen")
    assert stream_parts(tokenizer, ids, stop="heaven") == ["t", "", "", "he ", "", "", "", "heat", "", "", "hen", ""]


def test_the_earliest_of_several_stop_strings_ends_the_text():
    tokenizer = get_tokenizer("char", None)
    text = StreamingText(tokenizer, stop=["deep", "ark", "darkness"])
    assert text.add(*tokenizer.encode("and darkness on the deep")) == "and "
    assert text.matched_stop == "darkness"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(mb.InputError, match="empty stop string"):
        StreamingText(get_tokenizer("char", None), stop="")
