"""Handwritten digits of 8 × 8 pixels from scikit-learn (Alpaydin and Kaynak 1998)."""

from collections.abc import Iterator

from monoblock.data.order import permutation
from monoblock.data.readers import Image

SHARES = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}
BRIGHTEST = 16


def images(split: str) -> Iterator[Image]:
    """The images of one split, in an order that is fixed for good."""
    import numpy as np
    from sklearn.datasets import load_digits

    found = load_digits()
    count = len(found.images)
    low, high = (round(share * count) for share in SHARES[split])
    for number in permutation(0, 0, count)[low:high]:
        pixels = (found.images[number] / BRIGHTEST).astype(np.float32)
        yield Image(pixels[None], int(found.target[number]))  # (1, 8, 8)
