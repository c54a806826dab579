"""The fingerprint of a corpus: equal where every row is, another wherever anything differs."""

import hashlib

import numpy as np
import pytest

from monoblock.data.fingerprint import fingerprint
from monoblock.data.readers import Image, Labelled, Pair, Tagged

PIXELS = np.arange(12, dtype=np.float32).reshape(1, 3, 4) / 12
ROWS = {
    "texts": ["In the beginning", "", "God — \ud800"],  # a lone surrogate, as a damaged file may hold
    "pairs": [Pair("a", "b"), Pair("c", "d", 3)],
    "labelled": [Labelled("a", "x"), Labelled("b", "y")],
    "tagged": [Tagged(("the", "king"), ("O", "B"))],
    "images": [Image(PIXELS, 3), Image(PIXELS + 1, 4)],
}
OTHERS = {
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
    "labelled": [[Labelled("a", "x"), Labelled("b", "x")]],
    "tagged": [[Tagged(("the king",), ("O", "B"))], [Tagged(("the",), ("king", "O", "B"))]],
    "images": [
        [Image(PIXELS, 3), Image(PIXELS + 1, 5)],
        [Image(PIXELS.reshape(1, 4, 3), 3), Image(PIXELS + 1, 4)],
        [Image(PIXELS + 1e-7, 3), Image(PIXELS + 1, 4)],
    ],
}


@pytest.mark.parametrize("kind", ROWS)
def test_equal_rows_have_one_fingerprint_and_others_another(kind):
    assert fingerprint(ROWS[kind]) == fingerprint(list(ROWS[kind]))
    found = [fingerprint(rows) for rows in [ROWS[kind], ROWS[kind][:-1], *OTHERS[kind]]]
    assert len(set(found)) == len(found)


def test_it_is_the_sha256_of_lengths_and_rows():
    assert fingerprint(["a", "bc"]) == hashlib.sha256(b"1:a2:bc").hexdigest()


def test_how_pixels_lie_in_memory_does_not_matter():
    turned = np.asfortranarray(PIXELS)
    assert fingerprint([Image(turned, 3)]) == fingerprint([Image(PIXELS, 3)])
