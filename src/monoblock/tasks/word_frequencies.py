"""Rerank hypotheses by a log-linear combination of the model's score and the word's frequency in training targets.

    frequencies = WordFrequencies.from_pairs(train.rows)
    frequencies = tune_weight(frequencies, valid_hypotheses, valid_references)
    best = frequencies.rerank(hypotheses)[0]

Hypotheses are sorted by score + weight · log((count + 1) / (total + distinct + 1)), where `count` is the frequency of
the word, `total` the sum of all frequencies and `distinct` the number of words; weight 0 keeps the order. A weight is
never negative: where training and test targets are disjoint, as in a split lexicon, a negative weight would mark the
words of the training split as wrong, which says something about the split and nothing about the words.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.data.readers.records import Pair
from monoblock.errors import FileError, InputError
from monoblock.metrics.text import References, accuracy
from monoblock.untrusted_files import read_json

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import Hypothesis

CANDIDATE_WEIGHTS = tuple(n / 100 for n in (0, *range(1, 11), 12, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200))


@dataclass(frozen=True)
class WordFrequencies:
    """Counts of the target words in the training data, and one weight of 0 or more for reranking.

    Reranking adds `weight` times the unigram log-probability of a hypothesis, computed from the counts, to its score.
    """

    counts: Counter[str]
    weight: float = 0.0

    def __post_init__(self) -> None:
        check_weight(self.weight)

    @classmethod
    def from_pairs(cls, rows: Iterable[Pair]) -> WordFrequencies:
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.target] += row.frequency
        return cls(counts)

    def log_probability(self, word: str) -> float:
        """Return the unigram log-probability of a word with add-one smoothing."""
        total = self.counts.total() + len(self.counts) + 1
        return math.log((self.counts[word] + 1) / total)

    def rerank(self, hypotheses: Sequence[Hypothesis], weight: float | None = None) -> list[Hypothesis]:
        """Return the hypotheses of one source, best first; ties keep their order. `weight` overrides self.weight."""
        weight = self.weight if weight is None else check_weight(weight)
        return sorted(
            hypotheses,
            key=lambda hypothesis: -((hypothesis.score or 0.0) + weight * self.log_probability(hypothesis.text)),
        )

    def write(self, path: Path) -> None:
        data = {"weight": self.weight, "counts": dict(sorted(self.counts.items()))}
        path.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> WordFrequencies:
        try:
            data = read_json(path)
            counts = {str(word): int(count) for word, count in data["counts"].items()}
            weight = float(data["weight"])
        except FileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            example = '{"weight": 0.1, "counts": {"word": 3}}'
            raise FileError(
                f"{path} has no word frequencies, as in {example}; write them with `monoblock evaluate --save-words`"
            ) from None
        try:
            return cls(Counter(counts), weight)
        except InputError as problem:
            raise FileError(f"{path}: {problem}") from None


def check_weight(weight: float) -> float:
    """Return the weight; raise InputError if it is negative or not a finite number."""
    if not 0 <= weight < math.inf:
        raise InputError(f"a weight of word frequencies must be 0 or more, not {weight:g}; tune it again, or write 0")
    return weight


def tune_weight(
    frequencies: WordFrequencies,
    hypotheses: Sequence[Sequence[Hypothesis]],
    references: References,
    weights: Sequence[float] = CANDIDATE_WEIGHTS,
) -> WordFrequencies:
    """Return the frequencies with the weight that gives the best top-1 accuracy of the reranked hypotheses.

    Of equally good weights, the smallest is chosen.

    hypotheses, references: the hypotheses and the accepted targets of each validation source.
    weights: the weights to try, each 0 or more.
    """

    def top1_accuracy(weight: float) -> float:
        return accuracy([[frequencies.rerank(row, weight)[0].text] for row in hypotheses], references)

    best = max(weights, key=lambda weight: (top1_accuracy(weight), -weight))
    return WordFrequencies(frequencies.counts, best)
