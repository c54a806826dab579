"""The order of samples: a pure function of (seed, epoch, index), the same whoever asks, however often, from anywhere.

Drawn from Philox, a counter put through a keyed mixing (Salmon et al. 2011).  Only its raw 64-bit stream is used: that
one numpy promises never to change, which it does not say of `Generator.permutation`.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import InputError

# What a draw is for.  Each purpose has a stream of its own, so that adding one never moves another.
PURPOSES = {"samples": 0, "offset": 1, "batches": 2, "augment": 3}
LARGEST = 2**64


def draws(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.uint64]:
    """So many 64-bit numbers, keyed by (seed, epoch)."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < LARGEST:
            raise InputError(f"{name}={value} cannot be: write a whole number from 0 to below 2**64")
    key = np.array([seed, epoch], dtype=np.uint64)
    # The stream runs through the low words of the counter; the highest is never reached and tells the purposes apart.
    counter = np.array([0, 0, 0, PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int, purpose: str = "samples") -> NDArray[np.int64]:
    """The numbers 0 … count − 1 in the order of this epoch; read-only, because it is remembered."""
    order = np.argsort(draws(seed, epoch, count, purpose), kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def sample_at(index: int, count: int, seed: int) -> tuple[int, int]:
    """Epoch and sample number of the index-th sample ever seen, `count` of them an epoch."""
    if count < 1 or index < 0:
        raise InputError(f"there is no sample {index} of {count}; an index starts at 0 and a corpus holds one or more")
    epoch, place = divmod(index, count)
    return epoch, int(permutation(seed, epoch, count)[place])
