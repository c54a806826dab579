"""Labels that speak of runs of words: B-PER I-PER O.  Which may follow which, the best such row, and its entities.

BIO (a run begins with B; IOB1 writes B only where two runs touch) and IOBES, also spelled BILOU (the last word of a run
is E or L, a run of one word S or U).  Labels of another form, such as parts of speech, are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monoblock.data.readers import Tagged

OUTSIDE = "O"
SPELLED = {"L": "E", "U": "S"}  # BILOU's letters
PLACES = "BIES"
CLOSED = "OES"  # after these a run is over


class Entity(NamedTuple):
    """The words [start, end) and what they are."""

    kind: str
    start: int
    end: int


def parse(label: str) -> tuple[str, str] | None:
    """The place of a label in its run and the kind of the run; None where it is not of this form."""
    if label == OUTSIDE:
        return OUTSIDE, ""
    place, dash, kind = label.partition("-")
    place = SPELLED.get(place, place)
    return (place, kind) if dash and kind and len(place) == 1 and place in PLACES else None


def speaks_of_runs(labels: Iterable[str]) -> bool:
    found = [parse(label) for label in labels]
    return all(found) and any(row is not None and row[1] for row in found)


def entities(labels: Sequence[str]) -> list[Entity]:
    """The runs of a row of labels as conlleval finds them (Tjong Kim Sang and De Meulder 2003).

    A run begins at B or S, after O, E, S, and wherever the kind changes, so that every row of labels has a meaning.
    """
    found: list[Entity] = []
    before, kind = OUTSIDE, ""
    for number, label in enumerate(labels):
        row = parse(label)
        place, now = row if row is not None else (OUTSIDE, "")
        if place != OUTSIDE:
            if place in "BS" or before in CLOSED or now != kind:
                found.append(Entity(now, number, number + 1))
            else:
                found[-1] = found[-1]._replace(end=number + 1)
        before, kind = place, now
    return found


# -- which may follow which ---------------------------------------------------------------------------------------


class Grammar(NamedTuple):
    """Over the labels of a model: which may begin, which may follow which, which may end (True: may)."""

    begins: NDArray[np.bool_]  # (classes,)
    follows: NDArray[np.bool_]  # (classes, classes): [before, after]
    ends: NDArray[np.bool_]  # (classes,)


def grammar(labels: Sequence[str]) -> Grammar | None:
    """What the form of the labels allows; None where they are of no such form."""
    if not speaks_of_runs(labels):
        return None
    rows = [row for label in labels if (row := parse(label)) is not None]
    marks_ends = any(place in "ES" for place, _ in rows)
    begins = np.array([_may_follow((OUTSIDE, ""), row, marks_ends) for row in rows])
    follows = np.array([[_may_follow(before, after, marks_ends) for after in rows] for before in rows])
    ends = np.array([not marks_ends or place in CLOSED for place, _ in rows])
    return Grammar(begins, follows, ends)


def _may_follow(before: tuple[str, str], after: tuple[str, str], marks_ends: bool) -> bool:
    goes_on = after[0] in "IE" and before[0] in "BI" and before[1] == after[1]
    if marks_ends and before[0] in "BI":
        return goes_on
    return goes_on or after[0] in "OBS"


def best_row(scores: NDArray[np.float64], rules: Grammar | None) -> list[int]:
    """The most probable labels that the grammar allows, from log-probabilities (words, classes) (Viterbi 1967)."""
    if not len(scores):
        return []
    if rules is None:
        return [int(number) for number in scores.argmax(-1)]
    ways = np.where(rules.follows, 0.0, -np.inf)
    best = np.where(rules.begins, scores[0], -np.inf)
    back = np.zeros(scores.shape, np.int64)
    for word in range(1, len(scores)):
        reached = best[:, None] + ways
        back[word] = reached.argmax(0)
        best = reached.max(0) + scores[word]
    best = np.where(rules.ends, best, -np.inf)
    row = [int(best.argmax())]
    for word in range(len(scores) - 1, 0, -1):
        row.append(int(back[word, row[-1]]))
    return row[::-1]


# -- IOB1 ---------------------------------------------------------------------------------------------------------


def is_iob1(rows: Iterable[Tagged], labels: Iterable[str]) -> bool:
    """Whether rows begin runs with I, as IOB1 does; BIO never does.

    `labels` are those of all rows there are: where some mark the ends of runs, such a beginning is a slip.
    """
    known = set(labels)
    if not speaks_of_runs(known) or any((parse(label) or OUTSIDE)[0] in "ES" for label in known):
        return False
    return any(
        place == "I" and (before in CLOSED or kind != last)
        for row in rows
        for (before, last), (place, kind) in _neighbours(row.labels)
    )


def _neighbours(labels: Sequence[str]) -> Iterable[tuple[tuple[str, str], tuple[str, str]]]:
    rows = [(OUTSIDE, ""), *(parse(label) or (OUTSIDE, "") for label in labels)]
    return pairwise(rows)


def as_bio(row: Tagged) -> Tagged:
    """The same entities with B at the head of each."""
    labels = [OUTSIDE] * len(row.labels)
    for kind, start, end in entities(row.labels):
        labels[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    return Tagged(row.words, tuple(labels))


# -- how many are right -------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """Entities of one kind, or of all: found by the model, there in truth, and both alike."""

    right: int = 0
    found: int = 0
    there: int = 0

    @property
    def precision(self) -> float:
        return 100 * self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return 100 * self.right / self.there if self.there else 0.0

    @property
    def f1(self) -> float:
        return 200 * self.right / (self.found + self.there) if self.found + self.there else 0.0

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        return Counts(self.right + other.right, self.found + other.found, self.there + other.there)


def count(found: Iterable[Sequence[str]], there: Iterable[Sequence[str]]) -> dict[str, Counts]:
    """Entities by kind: one is right where its kind and both its ends are."""
    counts: dict[str, Counts] = {}
    for ours, theirs in zip(found, there, strict=True):
        one, other = set(entities(ours)), set(entities(theirs))
        for some, unit in ((one & other, Counts(right=1)), (one, Counts(found=1)), (other, Counts(there=1))):
            for entity in some:
                counts[entity.kind] = counts.get(entity.kind, Counts()) + unit
    return dict(sorted(counts.items()))


def total(counts: dict[str, Counts]) -> Counts:
    """All kinds together: the micro average, which conlleval prints first."""
    whole = Counts()
    for one in counts.values():
        whole = whole + one
    return whole
