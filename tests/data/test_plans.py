"""Batch plans: every sample once per epoch, for any first step and any number of ranks."""

import numpy as np
import pytest

from monoblock.data.batches import BatchIndices, BucketBatchPlan, FixedBatchPlan, batch_for_rank
from monoblock.errors import InputError


def lengths(count=211, seed=0):
    return np.random.default_rng(seed).integers(1, 31, size=(count, 2))


PLANS = {
    "fixed": lambda seed=5: FixedBatchPlan(101, 7, seed),
    "fixed, larger than all": lambda seed=5: FixedBatchPlan(5, 11, seed),
    "buckets by tokens": lambda seed=5: BucketBatchPlan(lengths(), max_tokens=200, seed=seed),
    "buckets by samples": lambda seed=5: BucketBatchPlan(lengths()[:, 0], batch=8, seed=seed),
}


def to_tuple(batch):
    return batch.epoch, batch.indices.tolist()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own(plan):
    plan = plan()
    epochs = []
    for epoch in range(3):
        batches = [plan.batch_at(epoch * plan.batches + index) for index in range(plan.batches)]
        assert {batch.epoch for batch in batches} == {epoch}
        epochs.append([sample for batch in batches for sample in batch.indices.tolist()])
        assert sorted(epochs[-1]) == list(range(len(epochs[-1])))
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_any_step_can_come_first(plan):
    in_order = plan()
    expected = [to_tuple(in_order.batch_at(step)) for step in range(100)]
    for step in (99, 0, 57, 3, 98):
        assert to_tuple(plan().batch_at(step)) == expected[step]
    assert any(to_tuple(plan(6).batch_at(step)) != expected[step] for step in range(100))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_shares_of_all_ranks_are_the_global_batch(plan, world):
    plan = plan()
    for step in range(2 * plan.batches):
        batch = plan.batch_at(step)
        shares = [batch_for_rank(batch, rank, world) for rank in range(world)]
        assert all(share.epoch == batch.epoch for share in shares)
        assert sorted(sample for share in shares for sample in share.indices.tolist()) == sorted(batch.indices.tolist())
        assert max(len(share.indices) for share in shares) - min(len(share.indices) for share in shares) <= 1


def test_the_last_batch_may_be_dropped():
    plan = FixedBatchPlan(101, 7, 5, last="drop")
    assert plan.batches == 14
    assert {len(plan.batch_at(step).indices) for step in range(50)} == {7}
    left_out = [
        set(range(101)).difference(*(plan.batch_at(14 * e + p).indices.tolist() for p in range(14))) for e in (0, 1)
    ]
    assert [len(samples) for samples in left_out] == [3, 3]
    assert left_out[0] != left_out[1]


def test_buckets_keep_to_their_limits_and_pad_little():
    sizes = lengths(2003)
    sizes[:, 1] = sizes[:, 0] + sizes[:, 1] // 6  # a translation is about as long as its source
    plan = BucketBatchPlan(sizes, max_tokens=500, batch=29, seed=1)
    padded = 0
    for step in range(plan.batches):
        samples = plan.batch_at(step).indices
        tokens = len(samples) * sizes[samples].max(axis=0).sum()
        assert tokens <= 500
        assert len(samples) <= 29
        padded += tokens
    assert sizes.sum() / padded > 0.9
    shapes = [len(plan.batch_at(step).indices) for step in range(plan.batches)]
    assert shapes != sorted(shapes, reverse=True), "batches of short samples do not all come first"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedBatchPlan(0, 3, 1), "count=0"),
        (lambda: FixedBatchPlan(3, 0, 1), "batch=0"),
        (lambda: FixedBatchPlan(3, 7, 1, last="drop"), "write 3 or less"),
        (lambda: FixedBatchPlan(3, 1, 1).batch_at(-1), "step=-1"),
        (lambda: batch_for_rank(BatchIndices(0, np.arange(3)), 2, 2), "rank=2"),
        (lambda: BucketBatchPlan([3, 9], seed=1), "max_tokens"),
        (lambda: BucketBatchPlan([3, 9], max_tokens=8, seed=1), "sample 1 has 9 tokens, more than max_tokens=8"),
        (lambda: BucketBatchPlan([], batch=2, seed=1), "lengths of shape"),
    ],
)
def test_invalid_arguments_raise_one_line(make, message):
    with pytest.raises(InputError, match=message):
        make()
