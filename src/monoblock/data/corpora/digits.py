"""Handwritten digits of 8 × 8 pixels, from scikit-learn (Alpaydin and Kaynak 1998)."""

from collections.abc import Iterator

from monoblock.data.batching.order import permutation
from monoblock.data.readers.records import LabelledImage

SPLIT_FRACTIONS = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}
MAX_PIXEL_VALUE = 16


def load_images(split: str) -> Iterator[LabelledImage]:
    """Yield the images of one split in a fixed order."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    count = len(digits.images)
    start, stop = (round(fraction * count) for fraction in SPLIT_FRACTIONS[split])
    for number in permutation(0, 0, count)[start:stop]:
        pixels = (digits.images[number] / MAX_PIXEL_VALUE).astype(np.float32)
        yield LabelledImage(pixels[None], int(digits.target[number]))  # (1, 8, 8)
