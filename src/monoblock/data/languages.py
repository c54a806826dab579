"""Which language is this name in?  Names from pycountry in twenty languages that share the Latin alphabet.

A name that is written alike in two of them is left out, and so is one left in English.  All translations of one English
name go into one split, so that the countries and currencies of the test were never seen in any language.
"""

from collections.abc import Iterator

from monoblock.data.catalogues import entries, place, split_of
from monoblock.data.readers import Labelled

# fmt: off
LANGUAGES = ("cs", "da", "de", "es", "et", "fi", "fr", "ga", "hr", "hu",
             "is", "it", "lt", "nl", "pl", "pt", "ro", "sl", "sv", "tr")
# fmt: on
MOST = 700  # of a language: some have every language of the world, others only the countries


def names(split: str) -> Iterator[Labelled]:
    """Name and language, in an order that says nothing."""
    found: dict[str, dict[str, str]] = {}  # name: language: the English for it
    for language in LANGUAGES:
        for english, name in entries(language):
            if name != english:
                found.setdefault(name, {})[language] = english
    kept: dict[str, list[tuple[str, str]]] = {language: [] for language in LANGUAGES}
    for name in sorted(found, key=place):
        ((language, english), *others) = found[name].items()
        if not others and len(kept[language]) < MOST:
            kept[language].append((name, english))
    rows = [(name, english, language) for language, some in kept.items() for name, english in some]
    for name, english, language in sorted(rows, key=lambda row: place(row[0])):
        if split_of(english) == split:
            yield Labelled(name, language)
