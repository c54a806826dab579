"""The fingerprint of a corpus: equal if and only if all rows are."""

import hashlib

import numpy as np
import pytest

from monoblock.data.corpora.load import fingerprint_rows
from monoblock.data.readers.records import LabelledImage, LabelledText, Pair, TaggedSentence

PIXELS = np.arange(12, dtype=np.float32).reshape(1, 3, 4) / 12
ROWS = {
    "texts": ["In the beginning", "", "God — \ud800"],  # a lone surrogate, as a damaged file may hold
    "pairs": [Pair("a", "b"), Pair("c", "d", 3)],
    "labelled": [LabelledText("a", "x"), LabelledText("b", "y")],
    "tagged": [TaggedSentence(("the", "king"), ("O", "B"))],
    "images": [LabelledImage(PIXELS, 3), LabelledImage(PIXELS + 1, 4)],
}
DIFFERENT = {
    "texts": [
        ["In the beginning", "God — \ud800"],
        ["In the beginningGod — \ud800", ""],
        ["In the beginning", "", "God"],
    ],
    "pairs": [
        [Pair("a", "b"), Pair("c", "d", 2)],
        [Pair("c", "d", 3), Pair("a", "b")],
        [Pair("ab", ""), Pair("c", "d", 3)],
    ],
    "labelled": [[LabelledText("a", "x"), LabelledText("b", "x")]],
    "tagged": [[TaggedSentence(("the king",), ("O", "B"))], [TaggedSentence(("the",), ("king", "O", "B"))]],
    "images": [
        [LabelledImage(PIXELS, 3), LabelledImage(PIXELS + 1, 5)],
        [LabelledImage(PIXELS.reshape(1, 4, 3), 3), LabelledImage(PIXELS + 1, 4)],
        [LabelledImage(PIXELS + 1e-7, 3), LabelledImage(PIXELS + 1, 4)],
    ],
}


@pytest.mark.parametrize("kind", ROWS)
def test_fingerprints_are_equal_only_for_equal_rows(kind):
    assert fingerprint_rows(ROWS[kind]) == fingerprint_rows(list(ROWS[kind]))
    fingerprints = [fingerprint_rows(rows) for rows in [ROWS[kind], ROWS[kind][:-1], *DIFFERENT[kind]]]
    assert len(set(fingerprints)) == len(fingerprints)


def test_it_is_the_sha256_of_lengths_and_rows():
    assert fingerprint_rows(["a", "bc"]) == hashlib.sha256(b"1:a2:bc").hexdigest()


def test_the_memory_layout_of_pixels_does_not_matter():
    transposed = np.asfortranarray(PIXELS)
    assert fingerprint_rows([LabelledImage(transposed, 3)]) == fingerprint_rows([LabelledImage(PIXELS, 3)])
