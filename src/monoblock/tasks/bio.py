"""Chunking labels such as B-PER I-PER O: the entities they mark, valid label sequences, and Viterbi decoding.

In BIO, every entity begins with B. In IOB1, an entity begins with B only if it directly follows another entity of the
same type, and with I otherwise. IOBES also marks the last word of an entity by E, and an entity of one word by S; BILOU
is the same scheme with L for E and U for S. Other labels, such as parts of speech, are not a chunking scheme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from monoblock.data.readers.records import TaggedSentence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OUTSIDE = "O"
BILOU_TO_IOBES = {"L": "E", "U": "S"}
PREFIXES = "BIES"
CLOSING_PREFIXES = "OES"  # after a label with one of these prefixes, no entity is open


class Entity(NamedTuple):
    """An entity of type `kind`, which consists of words[start:end]."""

    kind: str
    start: int
    end: int


def parse_label(label: str) -> tuple[str, str] | None:
    """Split a label into its IOBES prefix and its entity type; return None if it is not a chunking label."""
    if label == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = label.partition("-")
    prefix = BILOU_TO_IOBES.get(prefix, prefix)
    return (prefix, kind) if dash and kind and len(prefix) == 1 and prefix in PREFIXES else None


def is_chunking_scheme(labels: Iterable[str]) -> bool:
    parsed = [parse_label(label) for label in labels]
    return all(parsed) and any(pair is not None and pair[1] for pair in parsed)


def extract_entities(labels: Sequence[str]) -> list[Entity]:
    """Extract the entities of a sentence as conlleval does (Tjong Kim Sang and De Meulder 2003).

    An entity begins at a label B or S, at any entity label after O, E or S, and where the type changes. So every
    sequence of labels is accepted, even an invalid one.
    """
    entities: list[Entity] = []
    last_prefix, last_kind = OUTSIDE, ""
    for index, label in enumerate(labels):
        prefix, kind = parse_label(label) or (OUTSIDE, "")
        if prefix != OUTSIDE:
            if prefix in "BS" or last_prefix in CLOSING_PREFIXES or kind != last_kind:
                entities.append(Entity(kind, index, index + 1))
            else:
                entities[-1] = entities[-1]._replace(end=index + 1)
        last_prefix, last_kind = prefix, kind
    return entities


# -- valid sequences --------------------------------------------------------------------------------------------------


class LabelTransitions(NamedTuple):
    """Which labels can start a sentence, which can follow each other, and which can end a sentence."""

    can_start: NDArray[np.bool_]  # (classes,)
    can_follow: NDArray[np.bool_]  # (classes, classes), indexed by [label, next label]
    can_end: NDArray[np.bool_]  # (classes,)


def build_transitions(labels: Sequence[str]) -> LabelTransitions | None:
    """Return the valid transitions between labels; None if the labels are not a chunking scheme."""
    import numpy as np

    if not is_chunking_scheme(labels):
        return None
    parsed = [pair for label in labels if (pair := parse_label(label)) is not None]
    marks_ends = any(prefix in "ES" for prefix, _ in parsed)
    can_start = np.array([_can_follow((OUTSIDE, ""), pair, marks_ends) for pair in parsed])
    can_follow = np.array([[_can_follow(before, after, marks_ends) for after in parsed] for before in parsed])
    can_end = np.array([not marks_ends or prefix in CLOSING_PREFIXES for prefix, _ in parsed])
    return LabelTransitions(can_start, can_follow, can_end)


def _can_follow(before: tuple[str, str], after: tuple[str, str], has_end_prefixes: bool) -> bool:
    continues = after[0] in "IE" and before[0] in "BI" and before[1] == after[1]
    if has_end_prefixes and before[0] in "BI":
        return continues
    return continues or after[0] in "OBS"


def viterbi_decode(scores: NDArray[np.float64], transitions: LabelTransitions | None) -> list[int]:
    """Return the class indices of the most probable valid sequence of labels (Viterbi 1967).

    scores: log-probabilities of shape (words, classes).
    transitions: None means that every sequence is valid.
    """
    import numpy as np

    if not len(scores):
        return []
    if transitions is None:
        return [int(label) for label in scores.argmax(-1)]
    transition_scores = np.where(transitions.can_follow, 0.0, -np.inf)
    best = np.where(transitions.can_start, scores[0], -np.inf)
    back = np.zeros(scores.shape, np.int64)
    for word in range(1, len(scores)):
        candidates = best[:, None] + transition_scores
        back[word] = candidates.argmax(0)
        best = candidates.max(0) + scores[word]
    best = np.where(transitions.can_end, best, -np.inf)
    path = [int(best.argmax())]
    for word in range(len(scores) - 1, 0, -1):
        path.append(int(back[word, path[-1]]))
    return path[::-1]


# -- IOB1 -------------------------------------------------------------------------------------------------------------


def is_iob1(rows: Iterable[TaggedSentence], labels: Iterable[str]) -> bool:
    """Return whether an entity in `rows` begins with I, which occurs in IOB1 but not in BIO.

    labels: all labels of the corpus. If one of them has the prefix E or S, the scheme is IOBES, an entity that begins
        with I is an annotation error, and the result is False.
    """
    known = set(labels)
    if not is_chunking_scheme(known) or any((parse_label(label) or OUTSIDE)[0] in "ES" for label in known):
        return False
    return any(
        prefix == "I" and (last_prefix in CLOSING_PREFIXES or kind != last_kind)
        for row in rows
        for (last_prefix, last_kind), (prefix, kind) in _adjacent_labels(row.labels)
    )


def _adjacent_labels(labels: Sequence[str]) -> Iterable[tuple[tuple[str, str], tuple[str, str]]]:
    return pairwise([(OUTSIDE, ""), *(parse_label(label) or (OUTSIDE, "") for label in labels)])


def to_bio(row: TaggedSentence) -> TaggedSentence:
    """Return the sentence with its labels converted to BIO."""
    labels = [OUTSIDE] * len(row.labels)
    for kind, start, end in extract_entities(row.labels):
        labels[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    return TaggedSentence(row.words, tuple(labels))


# -- precision, recall and F1 -----------------------------------------------------------------------------------------


class MatchCounts(NamedTuple):
    """The numbers of correct, predicted and gold entities; precision, recall and F1 are percentages."""

    correct: int = 0
    predicted: int = 0
    gold: int = 0

    @property
    def precision(self) -> float:
        return 100 * self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return 100 * self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        return 200 * self.correct / (self.predicted + self.gold) if self.predicted + self.gold else 0.0


def count_entities(predictions: Iterable[Sequence[str]], references: Iterable[Sequence[str]]) -> dict[str, MatchCounts]:
    """Count entities by type; a predicted entity is correct if a gold entity has the same type, start and end."""
    correct, predicted, gold = Counter[str](), Counter[str](), Counter[str]()
    for predicted_labels, gold_labels in zip(predictions, references, strict=True):
        found, expected = set(extract_entities(predicted_labels)), set(extract_entities(gold_labels))
        for counts, entities in ((correct, found & expected), (predicted, found), (gold, expected)):
            counts.update(entity.kind for entity in entities)
    kinds = sorted(predicted.keys() | gold.keys())
    return {kind: MatchCounts(correct[kind], predicted[kind], gold[kind]) for kind in kinds}


def sum_counts(counts: dict[str, MatchCounts]) -> MatchCounts:
    """Return the sum of the counts of all types; its F1 is the micro average, the first one that conlleval prints."""
    return MatchCounts(*(sum(column) for column in zip(*counts.values(), strict=True)))
