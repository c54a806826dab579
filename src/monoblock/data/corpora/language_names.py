"""Classify names by language: names from pycountry in twenty languages that share the Latin alphabet.

A name that two languages spell alike, or that is spelled as in English, is dropped. All translations of an English name
are in the same split, so that a model has not seen a test name in any language.
"""

from collections.abc import Iterator

from monoblock.data.corpora.pycountry_names import read_translations, split_of_word, stable_hash
from monoblock.data.readers.records import LabelledText

# fmt: off
LANGUAGES = ("cs", "da", "de", "es", "et", "fi", "fr", "ga", "hr", "hu",
             "is", "it", "lt", "nl", "pl", "pt", "ro", "sl", "sv", "tr")
# fmt: on
MAX_NAMES_PER_LANGUAGE = 700  # pycountry has far more names in some languages than in others


def load_names(split: str) -> Iterator[LabelledText]:
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
