"""Load passages to restore capitals and punctuation, a token classification whose labels come from the text itself.

A label is the punctuation mark after the word (`O` for none, `COMMA`, `PERIOD`, …), plus `+CAP` if the word begins with
a capital or `+UPPER` if it is in capitals throughout (LORD). Brackets and quotes are dropped.
"""

import re
from collections.abc import Iterator, Sequence

from monoblock.data.corpora.bible import group_verses, load_verses
from monoblock.data.readers.records import TaggedSentence

MARK_TO_LABEL = {
    "": "O",
    ",": "COMMA",
    ".": "PERIOD",
    ":": "COLON",
    ";": "SEMICOLON",
    "?": "QUESTION",
    "!": "EXCLAMATION",
}
CASE_SUFFIXES = ("", "+CAP", "+UPPER")
LABELS = tuple(mark + case for mark in MARK_TO_LABEL.values() for case in CASE_SUFFIXES)
LABEL_TO_MARK = {label: mark for mark, label in MARK_TO_LABEL.items()}

WORD_PATTERN = re.compile(r"(?P<word>\w+(?:['’-]+\w+)*['’]?)(?P<rest>[^\w\s]*)")
MIN_PASSAGE_WORDS = 40  # several sentences, so that capitals do not occur only at the start


def strip_punctuation(text: str) -> TaggedSentence:
    """Return the words of a text in lower case, labelled with the removed punctuation and capitals."""
    words, labels = [], []
    for match in WORD_PATTERN.finditer(text):
        word = match["word"]
        mark = next((mark for mark in match["rest"] if mark in MARK_TO_LABEL), "")
        words.append(word.lower())
        labels.append(MARK_TO_LABEL[mark] + _case_suffix(word))
    return TaggedSentence(tuple(words), tuple(labels))


def restore_punctuation(words: Sequence[str], labels: Sequence[str]) -> str:
    """Join words into a text, with the punctuation and capitals that their labels stand for."""
    return " ".join(_apply_label(word, label) for word, label in zip(words, labels, strict=True))


def load_passages(split: str) -> Iterator[TaggedSentence]:
    """Yield labelled passages of the King James Bible, each of consecutive whole verses of one chapter."""
    return (strip_punctuation(passage) for _, passage in group_verses(load_verses(split), MIN_PASSAGE_WORDS))


def _case_suffix(word: str) -> str:
    if len(word) > 1 and word.isupper():
        return "+UPPER"
    return "+CAP" if word[0].isupper() else ""


def _apply_label(word: str, label: str) -> str:
    mark, _, case = label.partition("+")
    written = word.upper() if case == "UPPER" else word[:1].upper() + word[1:] if case == "CAP" else word
    return written + LABEL_TO_MARK[mark]
