"""Exact match and F1 of answers, as the evaluation script of SQuAD defines them (Rajpurkar et al. 2016, 2018).

Both compare normalized texts: lowercase, without punctuation and articles, with single spaces.  If a question has
several gold answers, the one with the highest score counts.  If it has none, an empty answer is correct.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from monoblock.errors import InputError

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Return 1 if the answer equals a gold answer after normalization, else 0."""
    return float(any(normalize_answer(answer) == normalize_answer(gold) for gold in _nonempty_golds(golds)))


def f1_score(answer: str, golds: Sequence[str]) -> float:
    """Compute the F1 of the words of an answer, from 0 to 1, for the gold answer that gives the highest F1."""
    return max(
        _word_f1(normalize_answer(answer).split(), normalize_answer(gold).split()) for gold in _nonempty_golds(golds)
    )


def _nonempty_golds(golds: Sequence[str]) -> list[str]:
    """Return the gold answers that are not empty after normalization; [""] if there is none."""
    return [gold for gold in golds if normalize_answer(gold)] or [""]


def _word_f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    overlap = (Counter(answer) & Counter(gold)).total()
    return 2 * overlap / (len(answer) + len(gold))


def score_answers(answers: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[str, float | int]:
    """Compute exact match and F1 in percent over all questions, as the official script does.

    If only some questions have a gold answer, the answerable and the unanswerable ones are also scored separately.
    The accuracy on the unanswerable ones is a fraction from 0 to 1.
    """
    if len(answers) != len(golds) or not answers:
        raise InputError(
            f"there are {len(answers)} answers to {len(golds)} questions; give an answer to every question, "
            "and at least one"
        )
    pairs = list(zip(answers, golds, strict=True))
    scores = _mean_scores(pairs) | {"questions": len(pairs)}
    answerable = [(answer, gold) for answer, gold in pairs if gold]
    if 0 < len(answerable) < len(pairs):
        unanswerable = [(answer, gold) for answer, gold in pairs if not gold]
        scores |= {f"answerable_{name}": value for name, value in _mean_scores(answerable).items()}
        scores["unanswerable_accuracy"] = _mean_scores(unanswerable)["exact_match"] / 100
        scores["unanswerable"] = len(unanswerable)
    return scores


def _mean_scores(pairs: Sequence[tuple[str, Sequence[str]]]) -> dict[str, float | int]:
    count = len(pairs)
    return {
        "exact_match": 100 * sum(exact_match(answer, gold) for answer, gold in pairs) / count,
        "f1": 100 * sum(f1_score(answer, gold) for answer, gold in pairs) / count,
    }
