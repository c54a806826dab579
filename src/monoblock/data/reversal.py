"""Letters and the same letters reversed: a task without words, on which an encoder-decoder shows that it can look back.

Strings are drawn from a fixed stream, so that the corpus is the same everywhere; what one split holds, no other does.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from monoblock.data.readers import Pair

COUNTS = {"train": 100_000, "valid": 1_000, "test": 2_000}
SHORTEST, LONGEST = 2, 16
SEED = 8


def strings(split: str) -> Iterator[Pair]:
    """The pairs of one split: "k x a", "a x k"."""
    seen: set[str] = set()
    chance = Random(SEED)
    for name in ("test", "valid", "train"):  # what is held out comes first: it does not change with the size of train
        left = COUNTS[name]
        while left:
            length = SHORTEST + int(chance.random() * (LONGEST - SHORTEST + 1))
            text = "".join(ascii_lowercase[int(chance.random() * 26)] for _ in range(length))
            if text in seen:
                continue
            if name != "train":
                seen.add(text)
            left -= 1
            if name == split:
                yield Pair(" ".join(text), " ".join(reversed(text)))
