"""ROUGE (Lin 2004): how much of a summary is found again: words, pairs of words, the longest common order.

    scores = rouge(["the cat sat"], [["a cat sat down"]])      # one list of accepted references a text
    scores["rouge1"], scores["rouge2"], scores["rougeL"]       # F1, in percent, the mean over texts

Texts are lower-cased and cut at everything but a-z and 0-9, without stemming; of several references the nearest counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from monoblock.errors import InputError

CUT = re.compile(r"[^a-z0-9]+")
Words = Sequence[str]


def words(text: str) -> list[str]:
    return [word for word in CUT.split(text.lower()) if word]


def rouge_n(found: Words, reference: Words, n: int) -> float:
    """F1 of the n-grams, each counted as often as it occurs in both."""
    ours, theirs = _grams(found, n), _grams(reference, n)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(found: Words, reference: Words) -> float:
    """F1 of the longest common subsequence."""
    return _f1(_common(found, reference), len(found), len(reference))


KINDS: dict[str, Callable[[Words, Words], float]] = {
    "rouge1": partial(rouge_n, n=1),
    "rouge2": partial(rouge_n, n=2),
    "rougeL": rouge_l,
}


def rouge(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """ROUGE-1, -2 and -L of texts, each against the nearest of its references."""
    if len(texts) != len(references) or not texts or not all(references):
        raise InputError(f"{len(texts)} texts and {len(references)} rows of references; give one or more a text")
    cut = [(words(text), [words(one) for one in accepted]) for text, accepted in zip(texts, references, strict=True)]
    return {
        name: 100 * sum(max(score(text, one) for one in accepted) for text, accepted in cut) / len(cut)
        for name, score in KINDS.items()
    }


def _grams(text: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[place : place + n]) for place in range(len(text) - n + 1))


def _f1(same: int, ours: int, theirs: int) -> float:
    return 2 * same / (ours + theirs) if ours and theirs else 0.0


def _common(one: Words, other: Words) -> int:
    """The length of the longest common subsequence."""
    before = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for place, against in enumerate(other, 1):
            row.append(before[place - 1] + 1 if word == against else max(before[place], row[-1]))
        before = row
    return before[-1]
