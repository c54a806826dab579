"""Names of countries, places, languages, scripts and currencies that pycountry translates.

For transliteration only single words are kept: the Roman word has only the letters a to z, the native word only letters
of its script.  A few entries are translations and not transliterations (India, भारत), so pairs whose consonants sound
too different are dropped.
"""

from __future__ import annotations

import gettext
import hashlib
import re
import unicodedata
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from monoblock.data.indic_normalization import normalize_indic
from monoblock.data.readers.records import LabelledText, Pair
from monoblock.errors import FileError

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


def load_transliterations(languages: str, split: str) -> Iterator[Pair]:
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
            natives = [normalize_indic(word).strip(ZERO_WIDTH_JOINERS) for word in natives]
            for roman, native in zip(map(_normalize_roman, romans), natives, strict=True):
                in_scripts = re.fullmatch("[a-z]{2,}", roman) and _is_in_script(script, native)
                if in_scripts and _sounds_similar(roman, native):
                    yield roman, native


def _normalize_roman(word: str) -> str:
    """Convert a word to lower case without accents and apostrophes."""
    decomposed = unicodedata.normalize("NFKD", word.lower())
    return APOSTROPHES.sub("", "".join(character for character in decomposed if not unicodedata.combining(character)))


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


# -- names labelled with their language --------------------------------------------------------------------------------
# A name that two languages spell alike, or that is spelled as in English, is dropped.  All translations of an English
# name are in the same split, so that a model has not seen a test name in any language.

# fmt: off
LANGUAGES = ("cs", "da", "de", "es", "et", "fi", "fr", "ga", "hr", "hu",
             "is", "it", "lt", "nl", "pl", "pt", "ro", "sl", "sv", "tr")
# fmt: on
MAX_NAMES_PER_LANGUAGE = 700  # pycountry has far more names in some languages than in others


def load_language_names(split: str) -> Iterator[LabelledText]:
    """Yield names labelled with their language, in a pseudo-random order."""
    languages_of: dict[str, dict[str, str]] = {}  # name -> language -> English name
    for language in LANGUAGES:
        for english, name in read_translations(language):
            if name != english:
                languages_of.setdefault(name, {})[language] = english
    kept: dict[str, list[tuple[str, str]]] = {language: [] for language in LANGUAGES}
    for name in sorted(languages_of, key=stable_hash):
        ((language, english), *others) = languages_of[name].items()
        if not others and len(kept[language]) < MAX_NAMES_PER_LANGUAGE:
            kept[language].append((name, english))
    rows = [(name, english, language) for language, names in kept.items() for name, english in names]
    for name, english, language in sorted(rows, key=lambda row: stable_hash(row[0])):
        if split_of_word(english) == split:
            yield LabelledText(name, language)


# -- translations of pycountry -----------------------------------------------------------------------------------------

HELD_OUT_PERCENTILES = {"valid": (0, 10), "test": (10, 20)}


def read_translations(language: str) -> Iterator[tuple[str, str]]:
    """Yield (English name, translation) for all names that pycountry translates to `language`, a code such as "hi"."""
    # Importing pycountry would read all of its tables.
    spec = find_spec("pycountry")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "locales" / language / "LC_MESSAGES"
    files = sorted(folder.glob("*.mo"))
    if not files:
        raise FileError(f"{folder} has no .mo files; install a newer pycountry: pip install 'pycountry>=26.2.16'")
    for path in files:
        with open(path, "rb") as file:
            # gettext has no public function that lists all messages.
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, value in catalogue.items():
            if isinstance(key, str) and isinstance(value, str) and key:
                yield key, value


def stable_hash(word: str) -> int:
    """Return a hash of a word that is the same in every process."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")


def split_of_word(word: str) -> str:
    """Return the split of a word, which its hash decides: "valid" and "test" have a tenth of all words each."""
    percentile = stable_hash(word) % 100
    return next((split for split, (low, high) in HELD_OUT_PERCENTILES.items() if low <= percentile < high), "train")
