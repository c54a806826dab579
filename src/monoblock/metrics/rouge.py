"""ROUGE (Lin 2004): how many words and bigrams, and how long a subsequence, a text has in common with a reference.

    scores = rouge(["the cat sat"], [["a cat sat down"]])      # a list of references for each text
    scores["rouge1"], scores["rouge2"], scores["rougeL"]       # F1 in percent, the mean over texts

Texts are lowercased and split at everything but a-z and 0-9, without stemming.  If a text has several references, the
one with the highest score counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from monoblock.errors import InputError

NON_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")
WordSequence = Sequence[str]


def split_words(text: str) -> list[str]:
    return [word for word in NON_ALPHANUMERIC.split(text.lower()) if word]


def rouge_n(hypothesis: WordSequence, reference: WordSequence, n: int) -> float:
    """Compute the F1 of the n-grams that two texts share; a repeated n-gram counts as often as it occurs in both."""
    predicted, expected = _ngrams(hypothesis, n), _ngrams(reference, n)
    return _f1((predicted & expected).total(), predicted.total(), expected.total())


def rouge_l(hypothesis: WordSequence, reference: WordSequence) -> float:
    """Compute the F1 of the longest common subsequence of words."""
    return _f1(_lcs_length(hypothesis, reference), len(hypothesis), len(reference))


ROUGE_METRICS: dict[str, Callable[[WordSequence, WordSequence], float]] = {
    "rouge1": partial(rouge_n, n=1),
    "rouge2": partial(rouge_n, n=2),
    "rougeL": rouge_l,
}


def rouge(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute ROUGE-1, ROUGE-2 and ROUGE-L of texts, each against the best of its references."""
    if len(hypotheses) != len(references) or not hypotheses or not all(references):
        raise InputError(
            f"there are {len(hypotheses)} texts and {len(references)} lists of references; give at least one text, "
            "and for each text a list of one or more references"
        )
    pairs = [
        (split_words(text), [split_words(reference) for reference in accepted])
        for text, accepted in zip(hypotheses, references, strict=True)
    ]
    return {
        name: 100 * sum(max(metric(text, reference) for reference in accepted) for text, accepted in pairs) / len(pairs)
        for name, metric in ROUGE_METRICS.items()
    }


def _ngrams(words: WordSequence, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _f1(overlap: int, predicted: int, expected: int) -> float:
    return 2 * overlap / (predicted + expected) if predicted and expected else 0.0


def _lcs_length(a: WordSequence, b: WordSequence) -> int:
    """Compute the length of the longest common subsequence by dynamic programming."""
    previous = [0] * (len(b) + 1)
    for word in a:
        row = [0]
        for column, other in enumerate(b, 1):
            row.append(previous[column - 1] + 1 if word == other else max(previous[column], row[-1]))
        previous = row
    return previous[-1]
