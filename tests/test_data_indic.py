"""One spelling for what looks the same in an Indic script."""

import unicodedata

import pytest
from hypothesis import given, strategies as st

from monoblock.data.indic import NUKTAS, SPELLED_OUT, VIRAMAS, normalize, script_of

ZWNJ, ZWJ = "\u200c", "\u200d"
NUKTA, VIRAMA, I_SIGN = "\u093c", "\u094d", "\u093f"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("\u0958", "\u0915" + NUKTA),  # qa: taken apart, as Unicode excludes it from composition
        ("\u0928" + NUKTA, "\u0929"),  # nnna: put together
        ("\u0915" + I_SIGN + NUKTA, "\u0915" + NUKTA + I_SIGN),  # the dot belongs to the consonant
        ("\u0915" + NUKTA + NUKTA, "\u0915" + NUKTA),
        ("\u0905\u093e", "\u0906"),  # a + aa sign is the letter aa
        ("\u0bc6\u0bbe".join("\u0b95\u0b95"), "\u0b95\u0bca\u0b95"),  # Tamil e + aa is o
        ("\u0930" + VIRAMA + ZWJ + "\u092f", "\u0930" + VIRAMA + ZWJ + "\u092f"),  # eyelash ra
        ("\u0930" + VIRAMA + ZWJ + ZWNJ + "\u092f", "\u0930" + VIRAMA + ZWJ + "\u092f"),
        ("\u0915" + ZWJ + "\u0932", "\u0915\u0932"),  # no virama: it says nothing
        ("\u0915" + VIRAMA + ZWJ, "\u0915" + VIRAMA),  # nothing follows
        ("\u09a4\u09cd" + ZWJ, "\u09ce"),  # khanda ta
        ("Zürich", "Zürich"),
    ],
)
def test_spellings(typed, wanted):
    assert normalize(typed) == wanted


def test_joiners_can_all_be_dropped():
    assert normalize("\u0930" + VIRAMA + ZWJ + "\u092f", joiners="drop") == "\u0930" + VIRAMA + "\u092f"


def test_the_table_holds_letters_that_unicode_names_alike():
    for typed, letter in SPELLED_OUT.items():
        assert len(typed) == 2
        script = unicodedata.name(letter).split()[0]
        assert all(unicodedata.name(sign).startswith(script) for sign in typed)
        assert unicodedata.category(letter) == "Lo"
    for signs, word in ((NUKTAS, "NUKTA"), (VIRAMAS, "VIRAMA")):
        named = [unicodedata.name(sign, "") for sign in signs]
        assert sum(word in name for name in named) >= 6
        assert all(word in name or not name for name in named)


letters = st.text(st.sampled_from("कखतनरयअएआािीुूेैोौं़्" + ZWNJ + ZWJ + "ক" + "তঅা্" + "a "), max_size=12)


@given(letters)
def test_twice_is_once_and_the_result_is_composed(text):
    once = normalize(text)
    assert normalize(once) == once
    assert unicodedata.normalize("NFC", once) == once
    assert [sign for sign in once if sign == " "] == [sign for sign in text if sign == " "]


def test_the_script_of_a_text():
    words = {"दिल्ली": "devanagari", "சென்னை": "tamil", "12 Delhi": "latin", "ਪੰਜਾਬ": "gurmukhi", "12": "", "": ""}
    assert {word: script_of(word) for word in words} == words
