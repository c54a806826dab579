"""The order of samples: a pure function of (seed, epoch, index) that never changes."""

import numpy as np
import pytest

from monoblock.data.batches import PURPOSES, permutation, random_uint64
from monoblock.errors import InputError


@pytest.mark.parametrize("count", [1, 2, 101, 10_007])
def test_a_permutation_holds_every_number_once(count):
    assert sorted(permutation(3, 5, count)) == list(range(count))


def test_seed_and_epoch_each_change_the_order_and_nothing_else_does():
    orders = {(seed, epoch): tuple(permutation(seed, epoch, 101)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    np.random.seed(7)
    permutation.cache_clear()
    assert tuple(permutation(2, 1, 101)) == orders[2, 1]


def philox(counter, key):
    """Philox4x64-10 (Salmon et al. 2011): four numbers from a counter of four words and a key of two."""
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k, right % 2**64, (left >> 64) ^ d ^ l, left % 2**64
        k, l = (k + 0x9E3779B97F4A7C15) % 2**64, (l + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


@pytest.mark.parametrize("purpose", PURPOSES)
def test_random_numbers_are_those_of_the_paper(purpose):
    seed, epoch = 2**63 + 5, 7
    words = [
        philox((block, 0, 0, PURPOSES[purpose]), (seed, epoch)) for block in (1, 2, 3)
    ]  # numpy increments the counter first
    assert random_uint64(seed, epoch, 12, purpose).tolist() == [word for block in words for word in block]


def test_the_order_never_changes():
    """A stored checkpoint must resume with the samples it would have seen."""
    assert permutation(1, 0, 11).tolist() == [3, 5, 2, 9, 7, 10, 0, 8, 6, 1, 4]


def test_every_purpose_has_its_own_stream():
    assert len({tuple(random_uint64(1, 1, 3, purpose).tolist()) for purpose in PURPOSES}) == len(PURPOSES)


def test_fewer_numbers_are_a_prefix_of_more():
    assert random_uint64(4, 9, 5).tolist() == random_uint64(4, 9, 17)[:5].tolist()


def test_orders_are_nearly_uniform():
    firsts = [int(permutation(0, epoch, 5)[0]) for epoch in range(2000)]
    assert all(320 < firsts.count(sample) < 480 for sample in range(5))


def test_a_cached_order_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 7)[0] = 3


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1), (2**64, 0)])
def test_a_seed_outside_64_bits_is_rejected(seed, epoch):
    with pytest.raises(InputError, match="2\\*\\*64"):
        random_uint64(seed, epoch, 1)
