"""Normalize Unicode text in Indic scripts, so that words that look the same are spelled the same.

The rules are applied in this order:

1. **NFC.** A vowel sign typed as two characters becomes one (Tamil ெ + ா is ொ). A letter with a nukta, the dot below a
   consonant, becomes what NFC makes of it: क़ and ड़ (U+0958 … U+095F) are *decomposed* into letter and dot,
   because Unicode excludes them from composition, while ऩ ऱ ऴ are *composed*. Both ways of typing give the same result.
2. **Nukta.** A dot typed after a vowel sign is moved to directly after its consonant (NFC does not do this, because
   vowel signs have combining class 0), and a second dot on the same consonant is dropped.
3. **Vowel letters** typed as another vowel and a sign (अ + ा for आ) become one letter; NFC leaves them unchanged,
   although Unicode's tables list them as "do not use".
4. **Zero-width joiners.** ZWJ and ZWNJ have a meaning only between a virama and the next letter, where they choose
   between a half letter, a conjunct and a visible virama (Marathi's eyelash ra, र्‍य). They are kept there and dropped
   everywhere else; `joiners="drop"` drops all of them, for metrics that compare words and not their rendering.
   Bengali's older spelling of khanda ta, ত + virama + ZWJ, becomes ৎ.

Normalization is idempotent, and text in other scripts is only converted to NFC.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

ZWNJ, ZWJ = "\u200c", "\u200d"
# The Unicode blocks from Devanagari to Malayalam share one layout of 128 code points.
FIRST_CODE_POINT, BLOCK_SIZE = 0x0900, 0x80
SCRIPTS = ("devanagari", "bengali", "gurmukhi", "gujarati", "oriya", "tamil", "telugu", "kannada", "malayalam")


def _in_every_script(offset: int) -> str:
    """Return a string of the characters at `offset` in the Unicode block of each script."""
    return "".join(chr(FIRST_CODE_POINT + BLOCK_SIZE * block + offset) for block in range(len(SCRIPTS)))


# Not every script has a nukta: at this offset, Tamil has no character, and Malayalam has a kind of virama.
NUKTAS = "".join(mark for mark in _in_every_script(0x3C) if "NUKTA" in unicodedata.name(mark, ""))
VIRAMAS = _in_every_script(0x4D)
# Signs that are written on a letter: vowel signs, anusvara and similar ones.
DEPENDENT_SIGNS = "".join(_in_every_script(offset) for offset in (*range(0x00, 0x04), *range(0x3E, 0x4D)))

# Two characters, a vowel letter and a sign, and the one letter that looks the same (Unicode, chapter 12).
COMPOSED_VOWELS = {
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

_MISPLACED_NUKTA = re.compile(f"([{DEPENDENT_SIGNS}]+)([{NUKTAS}]+)")
_REPEATED_NUKTA = re.compile(f"([{NUKTAS}])\\1+")
_VOWEL_SEQUENCE = re.compile("|".join(map(re.escape, sorted(COMPOSED_VOWELS, key=len, reverse=True))))
_REDUNDANT_JOINER = re.compile(f"(?<![{VIRAMAS}])[{ZWNJ}{ZWJ}]+|(?<=[{VIRAMAS}])([{ZWNJ}{ZWJ}])[{ZWNJ}{ZWJ}]*")
_TRAILING_JOINER = re.compile(f"[{ZWNJ}{ZWJ}](?=$|[^\\w{DEPENDENT_SIGNS}{VIRAMAS}])")
_JOINERS = re.compile(f"[{ZWNJ}{ZWJ}]")
_KHANDA_TA = re.compile(f"\u09a4\u09cd{ZWJ}")


def normalize_indic(text: str, *, joiners: Literal["keep", "drop"] = "keep") -> str:
    """Normalize a text by the rules at the top of this file; joiners="drop" removes all zero-width joiners."""
    text = unicodedata.normalize("NFC", text)
    if not _has_indic(text):
        return text
    while (normalized := _apply_rules(text, joiners)) != text:  # the result of one rule may trigger another
        text = normalized
    return text


def _apply_rules(text: str, joiners: str) -> str:
    """Apply every rule once."""
    text = _MISPLACED_NUKTA.sub(r"\2\1", text)
    text = _REPEATED_NUKTA.sub(r"\1", text)
    text = _VOWEL_SEQUENCE.sub(lambda match: COMPOSED_VOWELS[match[0]], text)
    text = _KHANDA_TA.sub("\u09ce", text)
    if joiners == "drop":
        text = _JOINERS.sub("", text)
    else:
        text = _TRAILING_JOINER.sub("", _REDUNDANT_JOINER.sub(lambda match: match[1] or "", text))
    return unicodedata.normalize("NFC", text)


def _has_indic(text: str) -> bool:
    """Return whether a text has an Indic character or a zero-width joiner, so that a rule may change it."""
    end = FIRST_CODE_POINT + BLOCK_SIZE * len(SCRIPTS)
    return any(FIRST_CODE_POINT <= ord(character) < end or character in (ZWNJ, ZWJ) for character in text)


def script_of(text: str) -> str:
    """Return the script of the first letter of a text, such as "devanagari" or "latin", or "" if there is no letter."""
    for character in text:
        if unicodedata.category(character)[0] in "LM":
            return unicodedata.name(character, "").split(" ")[0].lower()
    return ""
