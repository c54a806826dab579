"""Exact match and F1 of answers, as the evaluation of SQuAD defines them (Rajpurkar et al. 2016, 2018).

Both compare normalised texts: lower case, without punctuation, without a, an and the, single spaces.  Of several gold
answers the nearest counts.  A question without an answer is right when nothing was answered.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from monoblock.errors import InputError

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact(answer: str, golds: Sequence[str]) -> float:
    """1 where the answer is one of the gold answers, but for case, punctuation, articles and spaces."""
    return float(any(normalized(answer) == normalized(gold) for gold in _accepted(golds)))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over the words, for the gold answer where it is highest."""
    return max(_overlap(normalized(answer).split(), normalized(gold).split()) for gold in _accepted(golds))


def _accepted(golds: Sequence[str]) -> list[str]:
    """The gold answers of which something is left when they are normalised; "" where there is none."""
    return [gold for gold in golds if normalized(gold)] or [""]


def _overlap(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    same = (Counter(found) & Counter(gold)).total()
    return 2 * same / (len(found) + len(gold))


def scored(answers: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float | int]:
    """Percentages over all questions, and where some have no answer, of both sorts by themselves."""
    if len(answers) != len(golds) or not answers:
        raise InputError(f"{len(answers)} answers to {len(golds)} questions; give as many, one or more")
    pairs = list(zip(answers, golds, strict=True))
    figures = _means(pairs) | {"questions": len(pairs)}
    have = [(answer, gold) for answer, gold in pairs if gold]
    if 0 < len(have) < len(pairs):
        have_not = [(answer, gold) for answer, gold in pairs if not gold]
        figures |= {f"answerable_{name}": value for name, value in _means(have).items()}
        figures |= {"unanswerable_accuracy": _means(have_not)["exact_match"], "unanswerable": len(have_not)}
    return figures


def _means(pairs: Sequence[tuple[str, Sequence[str]]]) -> dict[str, float | int]:
    count = len(pairs)
    return {
        "exact_match": 100 * sum(exact(answer, gold) for answer, gold in pairs) / count,
        "f1": 100 * sum(f1(answer, gold) for answer, gold in pairs) / count,
    }
