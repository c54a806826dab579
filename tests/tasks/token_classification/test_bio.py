"""Labels that speak of runs of words: entities as conlleval finds them, and the best row that a grammar allows."""

import itertools
import re

import numpy as np
import pytest

from monoblock.data.readers.records import TaggedSentence
from monoblock.tasks.token_classification.bio import (
    Entity,
    build_transitions,
    count_entities,
    extract_entities,
    is_chunking_scheme,
    is_iob1,
    sum_counts,
    to_bio,
    viterbi_decode,
)

BIO = ["O", *(f"{place}-{kind}" for place in "BI" for kind in ("PER", "LOC", "ORG"))]
IOBES = [*BIO, *(f"{place}-{kind}" for place in "ES" for kind in ("PER", "LOC", "ORG"))]

# Worked out by hand: labels, and the runs in them (conlleval's rules).
CASES = [
    ("B-PER I-PER O", [("PER", 0, 2)]),
    ("I-PER I-PER O", [("PER", 0, 2)]),  # a run may begin with I
    ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # a change of kind begins one
    ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
    ("O O O", []),
    ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
    ("S-LOC S-LOC", [("LOC", 0, 1), ("LOC", 1, 2)]),
    ("B-ORG I-ORG E-ORG E-ORG", [("ORG", 0, 3), ("ORG", 3, 4)]),
    ("U-LOC B-ORG L-ORG", [("LOC", 0, 1), ("ORG", 1, 3)]),  # BILOU's spelling
    ("B-a-b I-a-b", [("a-b", 0, 2)]),
]


@pytest.mark.parametrize(("labels", "wanted"), CASES)
def test_runs_are_found_as_by_hand(labels, wanted):
    assert extract_entities(labels.split()) == [Entity(*row) for row in wanted]


def rows(draw, labels, count=7):
    return [[labels[n] for n in draw.integers(len(labels), size=int(draw.integers(1, 11)))] for _ in range(count)]


def counted(found, there):
    """Word by word with two flags, as conlleval.pl counts: right where a run of both ends at once and began at once."""

    def split(label):
        return ("O", "") if label == "O" else (label[0], label[2:])

    def ends(before, now):
        (place, kind), (next_place, next_kind) = before, now
        return place in "ES" or (place in "BI" and next_place in "BSO") or (place != "O" and kind != next_kind)

    def begins(before, now):
        (last, kind), (place, next_kind) = before, now
        return place in "BS" or (place in "IE" and last in "OES") or (place != "O" and kind != next_kind)

    right = said = true = 0
    for ours, theirs in zip(found, there, strict=True):
        inside, one, other = False, ("O", ""), ("O", "")
        for a, b in zip([*map(split, ours), ("O", "")], [*map(split, theirs), ("O", "")], strict=True):
            if inside:
                ended = (ends(one, a), ends(other, b))
                if all(ended) and one[1] == other[1]:
                    inside, right = False, right + 1
                elif any(ended) or a[1] != b[1]:
                    inside = False
            started = (begins(one, a), begins(other, b))
            inside = inside or (all(started) and a[1] == b[1])
            said, true = said + started[0], true + started[1]
            one, other = a, b
    return right, said, true


@pytest.mark.parametrize("labels", [BIO, IOBES], ids=["BIO", "IOBES"])
def test_entities_are_counted_as_conlleval_counts_them(labels):
    draw = np.random.default_rng(5)
    for _ in range(200):
        there = rows(draw, labels)
        found = [[x if draw.random() < 0.6 else labels[draw.integers(len(labels))] for x in row] for row in there]
        assert sum_counts(count_entities(found, there)) == counted(found, there)


def test_counts_by_hand():
    there = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    kinds = count_entities(found, there)
    assert kinds["PER"] == (0, 1, 1), "half an entity is none"
    assert kinds["LOC"] == (1, 1, 1)
    assert kinds["ORG"] == (1, 2, 1)
    whole = sum_counts(kinds)
    assert (whole.precision, whole.recall) == pytest.approx((50, 200 / 3))
    assert whole.f1 == pytest.approx(2 * 50 * (200 / 3) / (50 + 200 / 3))
    assert sum_counts(count_entities([["O"]], [["O"]])).f1 == 0


# -- the best row -----------------------------------------------------------------------------------------------------


def allowed(labels):
    """Whether a row keeps its form, said in another way than the grammar says it: a run can be read off and back."""
    row = TaggedSentence(("w",) * len(labels), tuple(labels))
    return to_bio(row).labels == tuple(labels)


def brute(scores, labels, fine):
    ways = [way for way in itertools.product(range(len(labels)), repeat=len(scores)) if fine([labels[n] for n in way])]
    return max(ways, key=lambda way: sum(scores[word, n] for word, n in enumerate(way)))


def test_the_best_row_is_the_best_of_all_that_keep_bio():
    draw = np.random.default_rng(3)
    labels = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    moved = 0
    for _ in range(30):
        scores = np.log(draw.dirichlet(np.ones(5) / 2, size=4))
        got = viterbi_decode(scores, build_transitions(labels))
        assert tuple(got) == brute(scores, labels, allowed)
        moved += got != scores.argmax(-1).tolist()
    assert moved > 5, "rows that need no grammar would show nothing"


def closed(labels):
    """IOBES by a pattern over letters, one kind: O, S, or B I* E."""
    return re.fullmatch(r"(O|S|BI*E)*", "".join(label[0] for label in labels)) is not None


def test_the_best_row_is_the_best_of_all_that_keep_iobes():
    draw = np.random.default_rng(4)
    labels = ["B-X", "E-X", "I-X", "O", "S-X"]
    for _ in range(30):
        scores = np.log(draw.dirichlet(np.ones(5) / 2, size=5))
        assert tuple(viterbi_decode(scores, build_transitions(labels))) == brute(scores, labels, closed)


def test_other_labels_are_left_alone():
    assert not is_chunking_scheme(["NOUN", "VERB", "O"])
    assert not is_chunking_scheme(["O"])
    assert build_transitions(["COMMA+CAP", "O"]) is None
    scores = np.array([[0.1, 0.9], [0.8, 0.2]])
    assert viterbi_decode(scores, None) == [1, 0]
    assert viterbi_decode(np.empty((0, 2)), None) == []


# -- IOB1 -------------------------------------------------------------------------------------------------------------


def test_iob1_is_known_by_a_run_that_begins_with_i_and_is_turned_into_bio():
    row = TaggedSentence(tuple("abcde"), ("I-PER", "I-PER", "B-PER", "O", "I-LOC"))
    assert is_iob1([row], row.labels)
    turned = to_bio(row)
    assert turned.labels == ("B-PER", "I-PER", "B-PER", "O", "B-LOC")
    assert not is_iob1([turned], turned.labels)
    assert extract_entities(turned.labels) == extract_entities(row.labels)


@pytest.mark.parametrize("ends", ["S-PER", "E-PER", "U-LOC", "L-ORG"])
def test_one_slip_in_labels_that_mark_ends_is_no_iob1(ends):
    row = TaggedSentence(tuple("abc"), ("O", "I-PER", "O"))
    assert is_iob1([row], {"O", "I-PER", "B-PER"})
    assert not is_iob1([row], {"O", "I-PER", "B-PER", ends})
    assert not is_iob1([row], {"O", "I-PER", "NOUN"})  # labels of no such form are left as they are
