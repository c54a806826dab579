"""Chunking labels: entities are those of conlleval, and Viterbi finds the best valid sequence."""

import itertools
import re

import numpy as np
import pytest

from monoblock.data.readers.records import TaggedSentence
from monoblock.tasks.bio import (
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

BIO = ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in ("PER", "LOC", "ORG"))]
IOBES = [*BIO, *(f"{prefix}-{kind}" for prefix in "ES" for kind in ("PER", "LOC", "ORG"))]

# Labels and their entities by the rules of conlleval, worked out by hand.
CASES = [
    ("B-PER I-PER O", [("PER", 0, 2)]),
    ("I-PER I-PER O", [("PER", 0, 2)]),  # an entity may begin with I
    ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
    ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),  # a change of type begins an entity
    ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
    ("O O O", []),
    ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
    ("S-LOC S-LOC", [("LOC", 0, 1), ("LOC", 1, 2)]),
    ("B-ORG I-ORG E-ORG E-ORG", [("ORG", 0, 3), ("ORG", 3, 4)]),
    ("U-LOC B-ORG L-ORG", [("LOC", 0, 1), ("ORG", 1, 3)]),  # BILOU's spelling
    ("B-a-b I-a-b", [("a-b", 0, 2)]),
]


@pytest.mark.parametrize(("labels", "expected"), CASES)
def test_entities_are_those_worked_out_by_hand(labels, expected):
    assert extract_entities(labels.split()) == [Entity(*row) for row in expected]


def random_rows(rng, labels, count=7):
    return [[labels[n] for n in rng.integers(len(labels), size=int(rng.integers(1, 11)))] for _ in range(count)]


def conlleval_counts(predictions, references):
    """Count word by word as conlleval.pl does: an entity is correct if both sides begin and end it together."""

    def split(label):
        return ("O", "") if label == "O" else (label[0], label[2:])

    def ends(before, after):
        (prefix, kind), (next_prefix, next_kind) = before, after
        return prefix in "ES" or (prefix in "BI" and next_prefix in "BSO") or (prefix != "O" and kind != next_kind)

    def begins(before, after):
        (prefix, kind), (next_prefix, next_kind) = before, after
        changes = next_prefix != "O" and kind != next_kind
        return next_prefix in "BS" or (next_prefix in "IE" and prefix in "OES") or changes

    correct = predicted = gold = 0
    for row, reference in zip(predictions, references, strict=True):
        inside, last, last_gold = False, ("O", ""), ("O", "")
        for word, gold_word in zip([*map(split, row), ("O", "")], [*map(split, reference), ("O", "")], strict=True):
            if inside:
                ended = (ends(last, word), ends(last_gold, gold_word))
                if all(ended) and last[1] == last_gold[1]:
                    inside, correct = False, correct + 1
                elif any(ended) or word[1] != gold_word[1]:
                    inside = False
            started = (begins(last, word), begins(last_gold, gold_word))
            inside = inside or (all(started) and word[1] == gold_word[1])
            predicted, gold = predicted + started[0], gold + started[1]
            last, last_gold = word, gold_word
    return correct, predicted, gold


@pytest.mark.parametrize("labels", [BIO, IOBES], ids=["BIO", "IOBES"])
def test_entities_are_counted_as_by_conlleval(labels):
    rng = np.random.default_rng(5)
    for _ in range(200):
        references = random_rows(rng, labels)
        predictions = [
            [x if rng.random() < 0.6 else labels[rng.integers(len(labels))] for x in row] for row in references
        ]
        assert sum_counts(count_entities(predictions, references)) == conlleval_counts(predictions, references)


def test_counts_are_those_worked_out_by_hand():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O"]]
    predictions = [["B-PER", "O", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    counts = count_entities(predictions, references)
    assert counts["PER"] == (0, 1, 1), "a part of an entity is not correct"
    assert counts["LOC"] == (1, 1, 1)
    assert counts["ORG"] == (1, 2, 1)
    total = sum_counts(counts)
    assert (total.precision, total.recall) == pytest.approx((50, 200 / 3))
    assert total.f1 == pytest.approx(2 * 50 * (200 / 3) / (50 + 200 / 3))
    assert sum_counts(count_entities([["O"]], [["O"]])).f1 == 0


# -- Viterbi decoding -------------------------------------------------------------------------------------------------


def is_valid_bio(labels):
    """Whether a sequence is BIO, without the transitions under test: its entities in BIO are the sequence itself."""
    row = TaggedSentence(("w",) * len(labels), tuple(labels))
    return to_bio(row).labels == tuple(labels)


def is_valid_iobes(labels):
    """Whether a sequence of one entity type is IOBES, by a pattern over its prefixes: O, S, or B I* E."""
    return re.fullmatch(r"(O|S|BI*E)*", "".join(label[0] for label in labels)) is not None


def best_by_enumeration(scores, labels, is_valid):
    paths = itertools.product(range(len(labels)), repeat=len(scores))
    valid = [path for path in paths if is_valid([labels[n] for n in path])]
    return max(valid, key=lambda path: sum(scores[word, n] for word, n in enumerate(path)))


def test_viterbi_finds_the_best_of_all_valid_bio_sequences():
    rng = np.random.default_rng(3)
    labels = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    num_changed = 0
    for _ in range(30):
        scores = np.log(rng.dirichlet(np.ones(5) / 2, size=4))
        path = viterbi_decode(scores, build_transitions(labels))
        assert tuple(path) == best_by_enumeration(scores, labels, is_valid_bio)
        num_changed += path != scores.argmax(-1).tolist()
    assert num_changed > 5, "some sequences must differ from the argmax, or the test shows nothing"


def test_viterbi_finds_the_best_of_all_valid_iobes_sequences():
    rng = np.random.default_rng(4)
    labels = ["B-X", "E-X", "I-X", "O", "S-X"]
    for _ in range(30):
        scores = np.log(rng.dirichlet(np.ones(5) / 2, size=5))
        path = viterbi_decode(scores, build_transitions(labels))
        assert tuple(path) == best_by_enumeration(scores, labels, is_valid_iobes)


def test_labels_of_no_chunking_scheme_are_decoded_by_argmax():
    assert not is_chunking_scheme(["NOUN", "VERB", "O"])
    assert not is_chunking_scheme(["O"])
    assert build_transitions(["COMMA+CAP", "O"]) is None
    scores = np.array([[0.1, 0.9], [0.8, 0.2]])
    assert viterbi_decode(scores, None) == [1, 0]
    assert viterbi_decode(np.empty((0, 2)), None) == []


# -- IOB1 -------------------------------------------------------------------------------------------------------------


def test_iob1_is_recognized_by_an_entity_that_begins_with_i_and_converted_to_bio():
    row = TaggedSentence(tuple("abcde"), ("I-PER", "I-PER", "B-PER", "O", "I-LOC"))
    assert is_iob1([row], row.labels)
    converted = to_bio(row)
    assert converted.labels == ("B-PER", "I-PER", "B-PER", "O", "B-LOC")
    assert not is_iob1([converted], converted.labels)
    assert extract_entities(converted.labels) == extract_entities(row.labels)


@pytest.mark.parametrize("end_label", ["S-PER", "E-PER", "U-LOC", "L-ORG"])
def test_an_entity_that_begins_with_i_is_not_iob1_if_labels_mark_ends(end_label):
    row = TaggedSentence(tuple("abc"), ("O", "I-PER", "O"))
    assert is_iob1([row], {"O", "I-PER", "B-PER"})
    assert not is_iob1([row], {"O", "I-PER", "B-PER", end_label})
    assert not is_iob1([row], {"O", "I-PER", "NOUN"})  # not a chunking scheme
