"""Noise for back-translated sources (Edunov et al. 2018): words dropped, words blanked, words a little out of order.

Each is a pure function of the words and of a number generator; `noised` keys one by (seed, number of the line, kind),
so that a kind of noise does the same to a line whether it comes alone or together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random

from monoblock.errors import InputError, did_you_mean

BLANK = "<blank>"  # what stands for a word that is not told
RATE = 0.1  # of words dropped, and of words blanked
DISTANCE = 3  # a word moves no further


def drop(words: Sequence[str], chance: Random, rate: float = RATE) -> list[str]:
    """Leave each word out with this probability; where none would be left, one stays."""
    kept = [word for word in words if chance.random() >= rate]
    return kept or ([words[int(chance.random() * len(words))]] if words else [])


def blank(words: Sequence[str], chance: Random, rate: float = RATE) -> list[str]:
    """Put BLANK in the place of each word with this probability."""
    return [BLANK if chance.random() < rate else word for word in words]


def permutation(words: Sequence[str], chance: Random, distance: int = DISTANCE) -> list[str]:
    """Words out of order, none further than `distance` from its place (Lample et al. 2018).

    Sorting by place + a number below distance + 1 can only let a word overtake those at most `distance` before it.
    """
    keys = [place + (distance + 1) * chance.random() for place in range(len(words))]
    return [words[place] for place in sorted(range(len(words)), key=keys.__getitem__)]


# In the order they are done.
KINDS: dict[str, Callable[[Sequence[str], Random], list[str]]] = {
    "drop": drop,
    "blank": blank,
    "permutation": permutation,
}


def kinds_of(words: Iterable[str]) -> tuple[str, ...]:
    """Names of noise, checked, in the order they are done."""
    asked = list(words)
    for word in asked:
        if word not in KINDS:
            raise InputError(f"no noise {word!r}{did_you_mean(word, KINDS)}; there is {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)


def noised(text: str, kinds: Iterable[str], *, seed: int, number: int) -> str:
    """A line of text with these kinds of noise; the same for the same seed and number."""
    words = text.split()
    for kind in kinds_of(kinds):
        key = blake2b(f"{seed},{number},{kind}".encode(), digest_size=16).digest()
        words = KINDS[kind](words, Random(int.from_bytes(key)))
    return " ".join(words)
