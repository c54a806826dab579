"""Normalization of Indic scripts: one spelling for what looks the same."""

import unicodedata

import pytest
from hypothesis import given, strategies as st

from monoblock.data.indic_normalization import COMPOSED_VOWELS, NUKTAS, VIRAMAS, normalize_indic, script_of

ZWNJ, ZWJ = "\u200c", "\u200d"
NUKTA, VIRAMA, I_SIGN = "\u093c", "\u094d", "\u093f"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("\u0958", "\u0915" + NUKTA),  # qa: decomposed, as Unicode excludes it from composition
        ("\u0928" + NUKTA, "\u0929"),  # nnna: composed
        ("\u0915" + I_SIGN + NUKTA, "\u0915" + NUKTA + I_SIGN),  # the dot belongs to the consonant
        ("\u0915" + NUKTA + NUKTA, "\u0915" + NUKTA),
        ("\u0905\u093e", "\u0906"),  # a + aa sign is the letter aa
        ("\u0bc6\u0bbe".join("\u0b95\u0b95"), "\u0b95\u0bca\u0b95"),  # Tamil e + aa is o
        ("\u0930" + VIRAMA + ZWJ + "\u092f", "\u0930" + VIRAMA + ZWJ + "\u092f"),  # eyelash ra
        ("\u0930" + VIRAMA + ZWJ + ZWNJ + "\u092f", "\u0930" + VIRAMA + ZWJ + "\u092f"),
        ("\u0915" + ZWJ + "\u0932", "\u0915\u0932"),  # without a virama the joiner has no meaning
        ("\u0915" + VIRAMA + ZWJ, "\u0915" + VIRAMA),  # nothing follows
        ("\u09a4\u09cd" + ZWJ, "\u09ce"),  # khanda ta
        ("Zürich", "Zürich"),
    ],
)
def test_each_rule_gives_the_expected_spelling(typed, expected):
    assert normalize_indic(typed) == expected


def test_joiners_can_all_be_dropped():
    assert normalize_indic("\u0930" + VIRAMA + ZWJ + "\u092f", joiners="drop") == "\u0930" + VIRAMA + "\u092f"


def test_the_table_holds_letters_that_unicode_names_alike():
    for typed, letter in COMPOSED_VOWELS.items():
        assert len(typed) == 2
        script = unicodedata.name(letter).split()[0]
        assert all(unicodedata.name(character).startswith(script) for character in typed)
        assert unicodedata.category(letter) == "Lo"
    for characters, word in ((NUKTAS, "NUKTA"), (VIRAMAS, "VIRAMA")):
        names = [unicodedata.name(character, "") for character in characters]
        assert sum(word in name for name in names) >= 6
        assert all(word in name or not name for name in names)


letters = st.text(st.sampled_from("कखतनरयअएआािीुूेैोौं़्" + ZWNJ + ZWJ + "ক" + "তঅা্" + "a "), max_size=12)


@given(letters)
def test_normalization_is_idempotent_and_in_nfc(text):
    once = normalize_indic(text)
    assert normalize_indic(once) == once
    assert unicodedata.normalize("NFC", once) == once
    assert once.count(" ") == text.count(" ")


def test_the_script_of_a_text():
    words = {"दिल्ली": "devanagari", "சென்னை": "tamil", "12 Delhi": "latin", "ਪੰਜਾਬ": "gurmukhi", "12": "", "": ""}
    assert {word: script_of(word) for word in words} == words
