"""Add noise to back-translated source texts (Edunov et al. 2018): drop words, blank them out or shuffle them locally.

Each kind of noise is a function of the words and a random generator. `add_noise` seeds a separate generator for each
kind and line, so that a kind draws the same random numbers for a line whether or not other kinds are used too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random

from monoblock.errors import InputError, did_you_mean

BLANK_TOKEN = "<blank>"
DEFAULT_RATE = 0.1  # the probability that a word is dropped, or replaced by BLANK_TOKEN
MAX_DISTANCE = 3  # the number of positions that a word moves at most


def drop_words(words: Sequence[str], rng: Random, rate: float = DEFAULT_RATE) -> list[str]:
    """Drop each word with probability `rate`; if none would be left, keep one."""
    kept = [word for word in words if rng.random() >= rate]
    return kept or ([words[int(rng.random() * len(words))]] if words else [])


def blank_words(words: Sequence[str], rng: Random, rate: float = DEFAULT_RATE) -> list[str]:
    """Replace each word by BLANK_TOKEN with probability `rate`."""
    return [BLANK_TOKEN if rng.random() < rate else word for word in words]


def shuffle_words(words: Sequence[str], rng: Random, max_distance: int = MAX_DISTANCE) -> list[str]:
    """Shuffle words so that none moves further than `max_distance` (Lample et al. 2018).

    Words are sorted by their index plus a random number in [0, max_distance + 1), so that words further apart than
    `max_distance` keep their order.
    """
    keys = [index + (max_distance + 1) * rng.random() for index in range(len(words))]
    return [words[index] for index in sorted(range(len(words)), key=keys.__getitem__)]


# The kinds of noise by name, in the order in which they are applied.
NOISE_FUNCTIONS: dict[str, Callable[[Sequence[str], Random], list[str]]] = {
    "drop": drop_words,
    "blank": blank_words,
    "permutation": shuffle_words,
}


def check_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """Return the named kinds of noise in the order in which they are applied; raise InputError if one is unknown."""
    names = list(names)
    for name in names:
        if name not in NOISE_FUNCTIONS:
            hint = did_you_mean(name, NOISE_FUNCTIONS)
            raise InputError(f"noise {name!r} is unknown{hint}; write one of {', '.join(NOISE_FUNCTIONS)}")
    return tuple(kind for kind in NOISE_FUNCTIONS if kind in names)


def add_noise(text: str, kinds: Iterable[str], *, seed: int, line_number: int) -> str:
    """Add the given kinds of noise to a line of text; the same arguments always give the same result."""
    words = text.split()
    for kind in check_kinds(kinds):
        key = blake2b(f"{seed},{line_number},{kind}".encode(), digest_size=16).digest()
        words = NOISE_FUNCTIONS[kind](words, Random(int.from_bytes(key)))
    return " ".join(words)
