"""How good texts are: BLEU and chrF (sacreBLEU, with signature), character error rate, word accuracy, perplexity.

    score = bleu(["the cat sat"], [["the cat sat"]], lowercase=True)     # one list of accepted references a text
    score.value, score.signature

Everything is a percentage where the field's papers print one (BLEU, chrF, CER, accuracy), on whole corpora.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from monoblock.errors import ConfigError, InputError

References = Sequence[Sequence[str]]  # for each text the references that are accepted, one or more


class Score(NamedTuple):
    value: float
    signature: str = ""  # which version of the metric this is, in sacreBLEU's words


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"the package {name} is not installed; write pip install 'monoblock[eval]'") from None


def _streams(texts: Sequence[str], references: References) -> list[list[str | None]]:
    """References as sacreBLEU takes them: the first of every text, then the second, with None where there is none."""
    if len(texts) != len(references) or not texts or not all(references):
        raise InputError(
            f"{len(texts)} texts and {len(references)} rows of references; give one or more a text, one text or more"
        )
    most = max(map(len, references))
    return [[row[place] if place < len(row) else None for row in references] for place in range(most)]


def bleu(texts: Sequence[str], references: References, *, lowercase: bool = False, tokenize: str = "13a") -> Score:
    """BLEU4 of a corpus (Papineni et al. 2002) as sacreBLEU computes it (Post 2018)."""
    streams = _streams(texts, references)
    metric = _package("sacrebleu").BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    value = metric.corpus_score(list(texts), streams).score
    return Score(float(value), str(metric.get_signature()))


def chrf(texts: Sequence[str], references: References) -> Score:
    """chrF2 (Popović 2015): F-score of character n-grams up to six, recall counted twice."""
    streams = _streams(texts, references)
    metric = _package("sacrebleu").CHRF()
    value = metric.corpus_score(list(texts), streams).score
    return Score(float(value), str(metric.get_signature()))


def bleu_tokenized(texts: Sequence[str], references: References, language: str = "en") -> Score:
    """BLEU4 of lower-cased texts cut by the Moses tokenizer: the figure of tables made with multi-bleu.perl."""
    moses = _package("sacremoses").MosesTokenizer(lang=language)

    def cut(text: str) -> str:
        return str(moses.tokenize(text.lower(), return_str=True, escape=False))

    score = bleu([cut(text) for text in texts], [[cut(text) for text in row] for row in references], tokenize="none")
    return Score(score.value, f"{score.signature}|lc|moses.{language}")


# -- letters and words ----------------------------------------------------------------------------------------------


def edits(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions that make one the other."""
    before = list(range(len(other) + 1))
    for place, item in enumerate(one, 1):
        row = [place]
        for column, against in enumerate(other, 1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (item != against)))
        before = row
    return before[-1]


def cer(texts: Sequence[str], references: References) -> float:
    """Edits against the nearest accepted reference, in percent of its characters, over the corpus."""
    _streams(texts, references)
    wrong = total = 0
    for text, accepted in zip(texts, references, strict=True):
        # Of references equally near, the longest: the choice must not depend on the order of a file.
        distance, length = min((edits(text, reference), -len(reference)) for reference in accepted)
        wrong, total = wrong + distance, total - length
    return 100 * wrong / max(total, 1)


def accuracy(hypotheses: Sequence[Sequence[str]], references: References, k: int = 1) -> float:
    """Per cent of texts with an accepted reference among their first k hypotheses."""
    if len(hypotheses) != len(references) or not hypotheses:
        raise InputError(f"{len(hypotheses)} texts and {len(references)} rows of references; give as many, one or more")
    right = sum(not set(found[:k]).isdisjoint(accepted) for found, accepted in zip(hypotheses, references, strict=True))
    return 100 * right / len(hypotheses)


# -- language models ------------------------------------------------------------------------------------------------


def perplexity(loss: float) -> float:
    """exp of the mean cross-entropy in nats; a loss beyond 50 is shown as that of 50."""
    return math.exp(min(loss, 50.0))


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """What the loss of so many tokens costs for each byte of the text they spell; independent of the tokenizer."""
    if size < 1:
        raise InputError("a text of no bytes has no bits per byte; give one character or more")
    return loss * tokens / math.log(2) / size
