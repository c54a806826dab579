"""The order of samples: a pure function of (seed, epoch, index).

Random numbers come from Philox, a counter-based generator (Salmon et al. 2011). Only its raw 64-bit stream is used,
which numpy guarantees never to change, unlike `Generator.permutation`.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import InputError

# Each purpose has its own stream, so that adding one never changes another.
PURPOSES = {"samples": 0, "offset": 1, "batches": 2, "augment": 3}
SEED_LIMIT = 2**64


def random_uint64(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.uint64]:
    """Return `count` random 64-bit integers, a pure function of (seed, epoch) and `purpose`, a key of PURPOSES."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < SEED_LIMIT:
            raise InputError(f"{name}={value} is out of range; write a whole number from 0 to 2**64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    # The stream increments the low words of the counter; the highest, never reached, separates the purposes.
    counter = np.array([0, 0, 0, PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.int64]:
    """Return a random permutation of 0 … count − 1 for this epoch; the array is cached and therefore read-only."""
    order = np.argsort(random_uint64(seed, epoch, count, purpose), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def epoch_and_sample(index: int, count: int, seed: int) -> tuple[int, int]:
    """Return the epoch and sample at position `index` of a run, counted from 0 over epochs of `count` samples."""
    if count < 1 or index < 0:
        raise InputError(f"index={index} or count={count} is too small; write at least 0 and at least 1")
    epoch, position = divmod(index, count)
    return epoch, int(permutation(seed, epoch, count)[position])
