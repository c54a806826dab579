"""The order of samples, which depends only on the seed, the epoch and the number of samples.

Random numbers come from Philox, a counter-based generator (Salmon et al. 2011). Only its raw 64-bit integers are used,
because numpy guarantees that they never change, which it does not for `Generator.permutation`.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import InputError

# Each purpose has its own random numbers, so that a new purpose never changes the numbers of the others.
PURPOSES = {"samples": 0, "offset": 1, "batches": 2, "augment": 3, "holdout": 4, "blocks": 5}
SEED_LIMIT = 2**64


def random_uint64(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.uint64]:
    """Return `count` random 64-bit integers, which depend only on (seed, epoch) and `purpose`, a key of PURPOSES."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < SEED_LIMIT:
            raise InputError(f"{name}={value} is out of range; write a whole number from 0 to 2**64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    # Philox counts up in the low words of its 256-bit counter and never reaches the highest, which holds the purpose.
    counter = np.array([0, 0, 0, PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.int64]:
    """Return a random permutation of 0 … count − 1 for this epoch; the array is cached and therefore read-only."""
    order = np.argsort(random_uint64(seed, epoch, count, purpose), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def epoch_and_sample(index: int, count: int, seed: int) -> tuple[int, int]:
    """Return (epoch, sample) at position `index` of a run.

    `index` counts from 0 over all epochs; every epoch visits all `count` samples in its own random order.
    """
    if count < 1 or index < 0:
        raise InputError(f"index={index} or count={count} is too small; index must be at least 0, and count at least 1")
    epoch, position = divmod(index, count)
    return epoch, int(permutation(seed, epoch, count)[position])
