"""Metrics of generated text: BLEU and chrF (by sacreBLEU), character error rate, accuracy, ROUGE and perplexity.

    score = bleu(["the cat sat"], [["the cat sat"]], lowercase=True)     # a list of references for each text
    score.value, score.signature

BLEU, chrF and CER are percentages over the whole corpus; accuracy is a fraction from 0 to 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from monoblock.errors import ConfigError, InputError

NON_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")
References = Sequence[Sequence[str]]  # for each text one or more accepted references


class Score(NamedTuple):
    """The value of a metric, and sacreBLEU's signature, which states the version and options it was computed with."""

    value: float
    signature: str = ""


def _import_package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"the package {name} is not installed; write pip install 'monoblock[eval]'") from None


def _reference_streams(hypotheses: Sequence[str], references: References) -> list[list[str | None]]:
    """Transpose references for sacreBLEU: return a list of the first reference of every text, one of the second, etc.

    None stands for a missing reference.
    """
    _check_references(hypotheses, references)
    return [list(stream) for stream in itertools.zip_longest(*references)]


def _check_references(hypotheses: Sequence[str], references: References) -> None:
    if len(hypotheses) != len(references) or not hypotheses or not all(references):
        raise InputError(
            f"there are {len(hypotheses)} texts and {len(references)} lists of references; give at least one text, "
            "and for each text a list of one or more references"
        )


def bleu(hypotheses: Sequence[str], references: References, *, lowercase: bool = False, tokenize: str = "13a") -> Score:
    """Compute BLEU-4 of a corpus (Papineni et al. 2002) with sacreBLEU (Post 2018)."""
    streams = _reference_streams(hypotheses, references)
    metric = _import_package("sacrebleu").BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    value = metric.corpus_score(list(hypotheses), streams).score
    return Score(float(value), str(metric.get_signature()))


def chrf(hypotheses: Sequence[str], references: References) -> Score:
    """Compute chrF2 (Popović 2015): F-score of character n-grams up to length 6, with twice the weight on recall."""
    streams = _reference_streams(hypotheses, references)
    metric = _import_package("sacrebleu").CHRF()
    value = metric.corpus_score(list(hypotheses), streams).score
    return Score(float(value), str(metric.get_signature()))


def bleu_tokenized(hypotheses: Sequence[str], references: References, language: str = "en") -> Score:
    """Compute BLEU-4 of lowercased texts split by the Moses tokenizer, comparable to multi-bleu.perl."""
    moses = _import_package("sacremoses").MosesTokenizer(lang=language)

    def tokenize(text: str) -> str:
        return str(moses.tokenize(text.lower(), return_str=True, escape=False))

    tokenized_references = [[tokenize(text) for text in row] for row in references]
    score = bleu([tokenize(text) for text in hypotheses], tokenized_references, tokenize="none")
    return Score(score.value, f"{score.signature}|lc|moses.{language}")


# The metrics of translations; each gets all options, and sees to those that concern it.
TRANSLATION_METRICS: dict[str, Callable[[Sequence[str], References, bool, str], Score]] = {
    "bleu": lambda texts, references, lowercase, language: bleu(texts, references, lowercase=lowercase),
    "bleu_lowercased": lambda texts, references, lowercase, language: bleu(texts, references, lowercase=True),
    "bleu_tokenized": lambda texts, references, lowercase, language: bleu_tokenized(texts, references, language),
    "chrf": lambda texts, references, lowercase, language: chrf(texts, references),
}


# -- characters and words ---------------------------------------------------------------------------------------------


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Compute the Levenshtein distance: the fewest insertions, deletions and substitutions that turn `a` into `b`."""
    previous = list(range(len(b) + 1))
    for index, item in enumerate(a, 1):
        row = [index]
        for column, other in enumerate(b, 1):
            row.append(min(previous[column] + 1, row[-1] + 1, previous[column - 1] + (item != other)))
        previous = row
    return previous[-1]


def cer(hypotheses: Sequence[str], references: References) -> float:
    """Compute the character error rate in percent.

    It is the number of edits from each text to its nearest reference, divided by the characters of these references.
    """
    _check_references(hypotheses, references)
    errors = total = 0
    for text, accepted in zip(hypotheses, references, strict=True):
        # If several references are equally near, take the longest, so that their order does not matter.
        distance, length = min((edit_distance(text, reference), -len(reference)) for reference in accepted)
        errors, total = errors + distance, total - length
    return 100 * errors / max(total, 1)


def accuracy(hypotheses: Sequence[Sequence[str]], references: References, k: int = 1) -> float:
    """Compute the top-k accuracy, the fraction of texts for which one of the first k hypotheses is a reference."""
    if len(hypotheses) != len(references) or not hypotheses:
        raise InputError(
            f"there are {len(hypotheses)} lists of hypotheses and {len(references)} lists of references; give at least "
            "one of each, and as many of both"
        )
    pairs = zip(hypotheses, references, strict=True)
    correct = sum(not set(candidates[:k]).isdisjoint(accepted) for candidates, accepted in pairs)
    return correct / len(hypotheses)


# -- ROUGE -------------------------------------------------------------------------------------------------------------


def split_words(text: str) -> list[str]:
    return [word for word in NON_ALPHANUMERIC.split(text.lower()) if word]


def rouge_n(hypothesis: Sequence[str], reference: Sequence[str], n: int) -> float:
    """Compute the F1 of the n-grams that two texts share; a repeated n-gram counts as often as it occurs in both."""
    predicted, expected = _ngrams(hypothesis, n), _ngrams(reference, n)
    return _f1((predicted & expected).total(), predicted.total(), expected.total())


def rouge_l(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Compute the F1 of the longest common subsequence of words."""
    return _f1(_lcs_length(hypothesis, reference), len(hypothesis), len(reference))


ROUGE_METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "rouge1": partial(rouge_n, n=1),
    "rouge2": partial(rouge_n, n=2),
    "rougeL": rouge_l,
}


def rouge(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compute ROUGE-1, ROUGE-2 and ROUGE-L of texts (Lin 2004): F1 in percent, the mean over texts.

    They measure how many words and bigrams, and how long a subsequence, a text has in common with the best of its
    references. Texts are lowercased and split at everything but a-z and 0-9, without stemming.
    """
    _check_references(hypotheses, references)
    pairs = [
        (split_words(text), [split_words(reference) for reference in accepted])
        for text, accepted in zip(hypotheses, references, strict=True)
    ]
    return {
        name: 100 * sum(max(metric(text, reference) for reference in accepted) for text, accepted in pairs) / len(pairs)
        for name, metric in ROUGE_METRICS.items()
    }


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _f1(overlap: int, predicted: int, expected: int) -> float:
    return 2 * overlap / (predicted + expected) if predicted and expected else 0.0


def _lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence by dynamic programming."""
    previous = [0] * (len(b) + 1)
    for word in a:
        row = [0]
        for column, other in enumerate(b, 1):
            row.append(previous[column - 1] + 1 if word == other else max(previous[column], row[-1]))
        previous = row
    return previous[-1]


# -- language models --------------------------------------------------------------------------------------------------


def perplexity(loss: float) -> float:
    """Return exp(loss), where `loss` is the mean cross-entropy in nats; it is clamped to 50."""
    return math.exp(min(loss, 50.0))


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> float:
    """Convert the mean loss per token, in nats, to bits per byte of text, which are comparable between tokenizers."""
    if num_bytes < 1:
        raise InputError("an empty text has no bits per byte; give a text of one character or more")
    return loss * num_tokens / math.log(2) / num_bytes
