"""Load names in Roman letters and in an Indic script, from pycountry's translations of languages, countries and places.

Only single words are kept: the Roman word has only the letters a to z, the native word only letters of its script. A
few entries are translations and not transliterations (India, भारत), so pairs whose consonants sound too different are
dropped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache

from monoblock.data.corpora.pycountry_names import read_translations, split_of_word
from monoblock.data.indic_normalization import normalize_indic
from monoblock.data.readers.records import Pair

SCRIPT_BY_LANGUAGE = {
    "hi": "DEVANAGARI",
    "ta": "TAMIL",
    "mr": "DEVANAGARI",
    "pa": "GURMUKHI",
    "kn": "KANNADA",
    "bn": "BENGALI",
    "gu": "GUJARATI",
}
MIN_SIMILARITY = 0.5

# Consonants that some script does not distinguish are in one class, so that spellings of one word have equal classes.
SOUND_CLASSES = {**dict.fromkeys("pbfvw", "p"), **dict.fromkeys("td", "t"), **dict.fromkeys("kgqcxjsz", "k")}
SOUND_CLASSES |= {**dict.fromkeys("nm", "n"), **dict.fromkeys("rl", "r")}
ZERO_WIDTH_JOINERS = "\u200c\u200d"
APOSTROPHES = re.compile("['’‘ʼ]")


def load_names(languages: str, split: str) -> Iterator[Pair]:
    """Yield the pairs of one split in alphabetical order; `languages` is one code, or several joined by "+" ("hi+ta").

    A name that several languages share is in the same split for all of them.
    """
    pairs, split_keys = _all_pairs(languages)
    for roman, native in pairs:
        if split_of_word(split_keys[roman]) == split:
            yield Pair(roman, native)


@cache
def _all_pairs(languages: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return all (Roman, native) pairs of all splits, and a dict from Roman words to split keys.

    A split key is the word whose hash decides in which split a pair is.
    """
    pairs = sorted({pair for language in languages.split("+") for pair in _language_pairs(language)})
    return pairs, _split_keys(pairs)


def _language_pairs(language: str) -> Iterator[tuple[str, str]]:
    """Yield (Roman, native) pairs of normalized words for the single-word names of a language.

    A hyphenated name yields a pair for each of its words.
    """
    script = SCRIPT_BY_LANGUAGE[language]
    for key, value in read_translations(language):
        romans, natives = key.split("-"), value.split("-")
        if len(key.split()) == len(value.split()) == 1 and len(romans) == len(natives):
            for roman, native in zip(map(_normalize_roman, romans), map(_normalize_native, natives), strict=True):
                in_scripts = re.fullmatch("[a-z]{2,}", roman) and _is_in_script(script, native)
                if in_scripts and _sounds_similar(roman, native):
                    yield roman, native


def _normalize_roman(word: str) -> str:
    """Convert a word to lower case without accents and apostrophes."""
    decomposed = unicodedata.normalize("NFKD", word.lower())
    return APOSTROPHES.sub("", "".join(character for character in decomposed if not unicodedata.combining(character)))


def _normalize_native(word: str) -> str:
    return normalize_indic(word).strip(ZERO_WIDTH_JOINERS)


def _is_in_script(script: str, word: str) -> bool:
    def is_letter(character: str) -> bool:
        is_number = unicodedata.category(character).startswith("N")
        return unicodedata.name(character, "").startswith(f"{script} ") and not is_number

    return bool(word) and all(character in ZERO_WIDTH_JOINERS or is_letter(character) for character in word)


def _sounds_similar(roman: str, native: str) -> bool:
    """Return whether two words have similar consonants; True if neither has two or more consonants."""
    left, right = _consonant_classes(roman), _consonant_classes(_romanize(native))
    if max(len(left), len(right)) < 2:
        return True
    return SequenceMatcher(None, left, right, autojunk=False).ratio() >= MIN_SIMILARITY


def _romanize(native: str) -> str:
    """Romanize a word by the Unicode names of its letters; DEVANAGARI LETTER KHA becomes "kha"."""
    roman = ""
    for character in native:
        name = unicodedata.name(character, "")
        if " LETTER " in name:
            roman += name.split()[-1].lower()
        elif re.search("ANUSVARA|BINDU|BINDI|TIPPI", name):
            roman += "n"
    return roman


def _consonant_classes(word: str) -> str:
    return re.sub(r"(.)\1+", r"\1", "".join(SOUND_CLASSES.get(letter, "") for letter in word))


def _split_keys(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return a dict from Roman words to split keys, so that words that are connected are in the same split.

    Words are connected if they form a pair, directly or through other pairs: two Roman spellings of one native word
    have the same key, the alphabetically first of all connected words.
    """
    parent: dict[str, str] = {}

    def root(word: str) -> str:
        parent.setdefault(word, word)
        while parent[word] != word:
            word = parent[word]
        return word

    for roman, native in pairs:
        first, second = sorted((root(roman), root(native)))
        parent[second] = first
    return {roman: root(roman) for roman, _ in pairs}
