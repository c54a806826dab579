"""Hypotheses ordered anew by how frequent a word is: log-linear, a list built from the training targets.

    words = Frequencies.of(train.rows)
    words = tune(words, valid_answers, valid_references)
    best = words.order(answers)

A hypothesis has score + weight · log((count + 1) / (total + kinds + 1)); weight 0 leaves the order as it was.  It is
negative where held-out sources want other words than the training targets, as in a lexicon whose splits share none: a
model knows its training targets by heart and says them too often.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monoblock.data.readers.records import Pair
from monoblock.errors import FileError
from monoblock.metrics.text import References, accuracy
from monoblock.tasks.loaded_model import Hypothesis

WEIGHT_HUNDREDTHS = (0, *range(1, 11), 12, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200)  # in hundredths
CANDIDATE_WEIGHTS = tuple(
    sign * strength / 100 for strength in WEIGHT_HUNDREDTHS for sign in ((1, -1) if strength else (1,))
)


@dataclass(frozen=True)
class WordFrequencies:
    """How often each word was seen as a target, and the weight this is given."""

    counts: Counter[str]
    weight: float = 0.0

    @classmethod
    def from_pairs(cls, rows: Iterable[Pair]) -> WordFrequencies:
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.target] += row.frequency
        return cls(counts)

    def log_probability(self, word: str) -> float:
        """The log-probability of a word, one added to every count."""
        total = self.counts.total() + len(self.counts) + 1
        return math.log((self.counts[word] + 1) / total)

    def rerank(self, hypotheses: Sequence[Hypothesis], weight: float | None = None) -> list[Hypothesis]:
        """The hypotheses of one source, the best first; of equals, the one that was before."""
        strength = self.weight if weight is None else weight
        return sorted(
            hypotheses, key=lambda answer: -((answer.score or 0.0) + strength * self.log_probability(answer.text))
        )

    def write(self, path: Path) -> None:
        data = {"weight": self.weight, "counts": dict(sorted(self.counts.items()))}
        path.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> WordFrequencies:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            counts = {str(word): int(count) for word, count in data["counts"].items()}
            return cls(Counter(counts), float(data["weight"]))
        except OSError as problem:
            raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            wanted = '{"weight": 0.1, "counts": {"word": 3}}'
            raise FileError(f"{path} is no list of words; `evaluate --save-words` writes one: {wanted}") from None


def tune_weight(
    frequencies: WordFrequencies,
    hypotheses: Sequence[Sequence[Hypothesis]],
    references: References,
    weights: Sequence[float] = CANDIDATE_WEIGHTS,
) -> WordFrequencies:
    """The weight with the best top-1 accuracy on held-out sources; of equals, the weakest."""

    def reached(weight: float) -> float:
        return accuracy([[frequencies.rerank(answers, weight)[0].text] for answers in hypotheses], references)

    best = max(weights, key=lambda weight: (reached(weight), -abs(weight)))
    return WordFrequencies(frequencies.counts, best)
