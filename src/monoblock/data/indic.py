"""One spelling for what looks the same: Unicode normalisation of the scripts of India.

What is done, in this order, and why:

1. **NFC.**  Vowel signs of two parts become one (Tamil ெ + ா is ொ).  Letters with a nukta become what NFC makes of
   them, which is not the same for all: क़ and ड़ (U+0958 … U+095F) are *taken apart* into letter and dot, because Unicode
   excludes them from composition, while ऩ ऱ ऴ are *put together*.  Both ways of typing give one result, which is all a
   model needs.
2. **Nukta.**  It stands next to its consonant, once: a dot typed after a vowel sign is moved before it (NFC does not,
   since vowel signs have combining class 0), and a second dot is dropped.
3. **Vowel letters** that were put together by hand from another vowel and a sign (अ + ा for आ) become the one letter;
   NFC leaves them alone, as Unicode's tables of "do not use" sequences say.
4. **Zero-width joiners.**  ZWJ and ZWNJ mean something only after a virama, between it and the next letter, where they
   choose between a half letter, a conjunct and a visible virama (Marathi's eyelash ra, र्‍य).  They are kept there and
   dropped everywhere else; `joiners="drop"` drops all of them, for measures that count words and not their looks.
   Bengali's older spelling of khanda ta, ত + virama + ZWJ, becomes ৎ.

Normalising twice changes nothing more, and text in other scripts is only put into NFC.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

ZWNJ, ZWJ = "\u200c", "\u200d"
# The blocks of Unicode from Devanagari to Malayalam are laid out alike, 128 places each.
FIRST, SIZE = 0x0900, 0x80
SCRIPTS = ("devanagari", "bengali", "gurmukhi", "gujarati", "oriya", "tamil", "telugu", "kannada", "malayalam")


def _each(place: int) -> str:
    """The character at one place of every block."""
    return "".join(chr(FIRST + SIZE * block + place) for block in range(len(SCRIPTS)))


# Malayalam has a kind of virama where the others have the nukta.
NUKTAS = "".join(sign for sign in _each(0x3C) if "NUKTA" in unicodedata.name(sign, ""))
VIRAMAS = _each(0x4D)
SIGNS = "".join(_each(place) for place in (*range(0x00, 0x04), *range(0x3E, 0x4D)))  # vowel signs, anusvara …

# Vowel letter + sign -> the letter they look like (Unicode, tables of vowel letters not to be spelled out).
SPELLED_OUT = {
    "अॆ": "ऄ",
    "अा": "आ",
    "उु": "ऊ",
    "एॅ": "ऍ",
    "एॆ": "ऎ",
    "एे": "ऐ",
    "अॉ": "ऑ",
    "आॅ": "ऑ",
    "अो": "ओ",
    "आे": "ओ",
    "अौ": "औ",
    "आै": "औ",
    "অা": "আ",
    "ঋৃ": "ৠ",
    "ਅਾ": "ਆ",
    "ੲਿ": "ਇ",
    "ੲੀ": "ਈ",
    "ੳੁ": "ਉ",
    "ੳੂ": "ਊ",
    "ੲੇ": "ਏ",
    "ਅੈ": "ਐ",
    "ੳੋ": "ਓ",
    "ਅੌ": "ਔ",
    "અા": "આ",
    "અૅ": "ઍ",
    "અે": "એ",
    "અૈ": "ઐ",
    "અૉ": "ઑ",
    "અો": "ઓ",
    "અૌ": "ઔ",
}

_MISPLACED = re.compile(f"([{SIGNS}]+)([{NUKTAS}]+)")
_DOUBLED = re.compile(f"([{NUKTAS}])\\1+")
_SPELLED = re.compile("|".join(map(re.escape, sorted(SPELLED_OUT, key=len, reverse=True))))
_IDLE = re.compile(f"(?<![{VIRAMAS}])[{ZWNJ}{ZWJ}]+|(?<=[{VIRAMAS}])([{ZWNJ}{ZWJ}])[{ZWNJ}{ZWJ}]*")
_LAST = re.compile(f"[{ZWNJ}{ZWJ}](?=$|[^\\w{SIGNS}{VIRAMAS}])")
_JOINERS = re.compile(f"[{ZWNJ}{ZWJ}]")
_KHANDA_TA = re.compile(f"\u09a4\u09cd{ZWJ}")


def normalize(text: str, *, joiners: Literal["keep", "drop"] = "keep") -> str:
    """The one spelling of a text; see the top of this file."""
    text = unicodedata.normalize("NFC", text)
    if not _touched(text):
        return text
    while (better := _better(text, joiners)) != text:  # what one rule leaves may be a case of another
        text = better
    return text


def _better(text: str, joiners: str) -> str:
    """Every rule once."""
    text = _MISPLACED.sub(r"\2\1", text)
    text = _DOUBLED.sub(r"\1", text)
    text = _SPELLED.sub(lambda match: SPELLED_OUT[match[0]], text)
    text = _KHANDA_TA.sub("\u09ce", text)
    if joiners == "drop":
        text = _JOINERS.sub("", text)
    else:
        text = _LAST.sub("", _IDLE.sub(lambda match: match[1] or "", text))
    return unicodedata.normalize("NFC", text)


def _touched(text: str) -> bool:
    """Whether there is anything in it that the rules are about."""
    last = FIRST + SIZE * len(SCRIPTS)
    return any(FIRST <= ord(sign) < last or sign in (ZWNJ, ZWJ) for sign in text)


def script_of(text: str) -> str:
    """The script of the first letter, in Unicode's words and in small letters: "devanagari", "latin"; "" for none."""
    for sign in text:
        if unicodedata.category(sign)[0] in "LM":
            return unicodedata.name(sign, "").split(" ")[0].lower()
    return ""
