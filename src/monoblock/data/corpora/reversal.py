"""Generate strings of letters and their reversal, a synthetic task that an encoder-decoder solves only with attention.

The strings are generated from a fixed seed, so that the corpus is always the same. No string of "valid" or "test" is in
another split.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from monoblock.data.readers.records import Pair

SPLIT_SIZES = {"train": 100_000, "valid": 1_000, "test": 2_000}
MIN_LENGTH, MAX_LENGTH = 2, 16
SEED = 8


def generate_pairs(split: str) -> Iterator[Pair]:
    """Yield the pairs of one split: letters and the same letters reversed, such as "k x a" and "a x k"."""
    held_out: set[str] = set()
    rng = Random(SEED)
    for name in ("test", "valid", "train"):  # held-out splits first, so that they do not depend on the size of train
        remaining = SPLIT_SIZES[name]
        while remaining:
            length = MIN_LENGTH + int(rng.random() * (MAX_LENGTH - MIN_LENGTH + 1))
            text = "".join(ascii_lowercase[int(rng.random() * 26)] for _ in range(length))
            if text in held_out:
                continue
            if name != "train":
                held_out.add(text)
            remaining -= 1
            if name == split:
                yield Pair(" ".join(text), " ".join(reversed(text)))
