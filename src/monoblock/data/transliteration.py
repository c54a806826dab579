"""Names in Roman letters and in an Indic script, from pycountry's translations of languages, countries and places.

Kept are single words, the Roman side in a … z, the native side in its own script.  A few entries are translations and
not transliterations (India, भारत): a pair whose consonants do not sound alike is left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache

from monoblock.data.catalogues import entries, split_of
from monoblock.data.indic import normalize
from monoblock.data.readers import Pair

SCRIPTS = {
    "hi": "DEVANAGARI",
    "ta": "TAMIL",
    "mr": "DEVANAGARI",
    "pa": "GURMUKHI",
    "kn": "KANNADA",
    "bn": "BENGALI",
    "gu": "GUJARATI",
}
ALIKE = 0.5

# Sounds that one script or another writes alike, so that only a different word looks different.
SOUND = {**dict.fromkeys("pbfvw", "p"), **dict.fromkeys("td", "t"), **dict.fromkeys("kgqcxjsz", "k")}
SOUND |= {**dict.fromkeys("nm", "n"), **dict.fromkeys("rl", "r")}
JOINERS = "\u200c\u200d"
APOSTROPHES = re.compile("['’‘ʼ]")


def names(languages: str, split: str) -> Iterator[Pair]:
    """The pairs of one split, in alphabetical order, of a language or of several ("hi+ta").

    A name that several languages share goes into one split for all of them.
    """
    found, word_of = _all(languages)
    for roman, native in found:
        if split_of(word_of[roman]) == split:
            yield Pair(roman, native)


@cache
def _all(languages: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Every pair, and for each Roman word the one that decides its split."""
    found = sorted({pair for language in languages.split("+") for pair in _words(language)})
    return found, _families(found)


def _words(language: str) -> Iterator[tuple[str, str]]:
    """Every single-word entry, the parts of hyphenated ones apart, cleaned."""
    script = SCRIPTS[language]
    for key, value in entries(language):
        romans, natives = key.split("-"), value.split("-")
        if len(key.split()) == len(value.split()) == 1 and len(romans) == len(natives):
            for roman, native in zip(map(_plain, romans), map(_composed, natives), strict=True):
                if re.fullmatch("[a-z]{2,}", roman) and _written_in(script, native) and _sound_alike(roman, native):
                    yield roman, native


def _plain(word: str) -> str:
    """In small letters, without accents and apostrophes."""
    apart = unicodedata.normalize("NFKD", word.lower())
    return APOSTROPHES.sub("", "".join(sign for sign in apart if not unicodedata.combining(sign)))


def _composed(word: str) -> str:
    return normalize(word).strip(JOINERS)


def _written_in(script: str, word: str) -> bool:
    def belongs(sign: str) -> bool:
        digit = unicodedata.category(sign).startswith("N")
        return sign in JOINERS or (unicodedata.name(sign, "").startswith(f"{script} ") and not digit)

    return bool(word) and all(map(belongs, word))


def _sound_alike(roman: str, native: str) -> bool:
    """Whether the consonants of the two come in much the same order; with fewer than two there is nothing to judge."""
    left, right = _consonants(roman), _consonants(_spelled(native))
    return max(len(left), len(right)) < 2 or SequenceMatcher(None, left, right, autojunk=False).ratio() >= ALIKE


def _spelled(native: str) -> str:
    """By the names that Unicode gives the letters: DEVANAGARI LETTER KHA is kha."""
    spelled = ""
    for sign in native:
        name = unicodedata.name(sign, "")
        if " LETTER " in name:
            spelled += name.split()[-1].lower()
        elif re.search("ANUSVARA|BINDU|BINDI|TIPPI", name):
            spelled += "n"
    return spelled


def _consonants(word: str) -> str:
    return re.sub(r"(.)\1+", r"\1", "".join(SOUND.get(letter, "") for letter in word))


def _families(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """For each Roman word the first of all that share a spelling with it on either side: they go into one split."""
    parent: dict[str, str] = {}

    def root(word: str) -> str:
        parent.setdefault(word, word)
        while parent[word] != word:
            word = parent[word]
        return word

    for roman, native in pairs:
        one, other = sorted((root(roman), root(native)))
        parent[other] = one
    return {roman: root(roman) for roman, _ in pairs}
