"""Noise for back-translated sources (Edunov et al. 2018): drop, blank and locally shuffle words.

Each kind of noise is a pure function of words and a random generator. `add_noise` seeds one generator for each (seed,
line number, kind), so that a kind draws the same numbers for a line whether it is used alone or with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random

from monoblock.errors import InputError, did_you_mean

BLANK_TOKEN = "<blank>"
DEFAULT_RATE = 0.1  # of dropping and of blanking a word
MAX_DISTANCE = 3  # that a word moves


def drop_words(words: Sequence[str], rng: Random, rate: float = DEFAULT_RATE) -> list[str]:
    """Drop each word with probability `rate`; if none would be left, keep one."""
    kept = [word for word in words if rng.random() >= rate]
    return kept or ([words[int(rng.random() * len(words))]] if words else [])


def blank_words(words: Sequence[str], rng: Random, rate: float = DEFAULT_RATE) -> list[str]:
    """Replace each word by BLANK_TOKEN with probability `rate`."""
    return [BLANK_TOKEN if rng.random() < rate else word for word in words]


def shuffle_words(words: Sequence[str], rng: Random, max_distance: int = MAX_DISTANCE) -> list[str]:
    """Shuffle words so that none moves further than `max_distance` (Lample et al. 2018).

    Sort by index + a random number in [0, max_distance + 1): words further apart than `max_distance` keep their order.
    """
    keys = [index + (max_distance + 1) * rng.random() for index in range(len(words))]
    return [words[index] for index in sorted(range(len(words)), key=keys.__getitem__)]


# In the order of application.
NOISE_FUNCTIONS: dict[str, Callable[[Sequence[str], Random], list[str]]] = {
    "drop": drop_words,
    "blank": blank_words,
    "permutation": shuffle_words,
}


def check_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of noise in their order of application; raise InputError if one is unknown."""
    names = list(names)
    for name in names:
        if name not in NOISE_FUNCTIONS:
            hint = did_you_mean(name, NOISE_FUNCTIONS)
            raise InputError(f"noise {name!r} is unknown{hint}; write one of {', '.join(NOISE_FUNCTIONS)}")
    return tuple(kind for kind in NOISE_FUNCTIONS if kind in names)


def add_noise(text: str, kinds: Iterable[str], *, seed: int, line_number: int) -> str:
    """Add these kinds of noise to a line of text; the result is a pure function of the arguments."""
    words = text.split()
    for kind in check_kinds(kinds):
        key = blake2b(f"{seed},{line_number},{kind}".encode(), digest_size=16).digest()
        words = NOISE_FUNCTIONS[kind](words, Random(int.from_bytes(key)))
    return " ".join(words)
