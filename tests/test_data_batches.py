"""Plans and the loader: nothing repeats, nothing is skipped, whatever the interruptions, workers and world size."""

import gc
import multiprocessing
import time

import numpy as np
import pytest
import torch

from monoblock.data.batches import Batch, BucketPlan, FixedPlan
from monoblock.data.blocks import Blocks
from monoblock.data.loader import Loader
from monoblock.data.shards import Tokens
from monoblock.errors import FileError, InputError


def lengths(count=211, seed=0):
    return np.random.default_rng(seed).integers(1, 31, size=(count, 2))


PLANS = {
    "fixed": lambda seed=5: FixedPlan(101, 7, seed),
    "fixed, larger than all": lambda seed=5: FixedPlan(5, 11, seed),
    "buckets by tokens": lambda seed=5: BucketPlan(lengths(), max_tokens=200, seed=seed),
    "buckets by samples": lambda seed=5: BucketPlan(lengths()[:, 0], batch=8, seed=seed),
}


def numbers(batch):
    return batch.epoch, batch.samples.tolist()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own(plan):
    plan = plan()
    epochs = []
    for epoch in range(3):
        batches = [plan.at(epoch * plan.batches + place) for place in range(plan.batches)]
        assert {batch.epoch for batch in batches} == {epoch}
        epochs.append([sample for batch in batches for sample in batch.samples.tolist()])
        assert sorted(epochs[-1]) == list(range(len(epochs[-1])))
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_any_step_can_be_asked_for_first(plan):
    unbroken = plan()
    wanted = [numbers(unbroken.at(step)) for step in range(100)]
    for step in (99, 0, 57, 3, 98):
        assert numbers(plan().at(step)) == wanted[step]
    assert any(numbers(plan(6).at(step)) != wanted[step] for step in range(100))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_together_see_the_global_batch(plan, world):
    plan = plan()
    for step in range(2 * plan.batches):
        batch = plan.at(step)
        parts = [plan.split(batch, rank, world) for rank in range(world)]
        assert all(part.epoch == batch.epoch for part in parts)
        assert sorted(sample for part in parts for sample in part.samples.tolist()) == sorted(batch.samples.tolist())
        assert max(len(part.samples) for part in parts) - min(len(part.samples) for part in parts) <= 1


def test_the_last_batch_may_be_dropped():
    plan = FixedPlan(101, 7, 5, last="drop")
    assert plan.batches == 14
    assert {len(plan.at(step).samples) for step in range(50)} == {7}
    left_out = [set(range(101)).difference(*(plan.at(14 * e + p).samples.tolist() for p in range(14))) for e in (0, 1)]
    assert [len(some) for some in left_out] == [3, 3]
    assert left_out[0] != left_out[1]


def test_buckets_keep_to_their_limits_and_pad_little():
    sizes = lengths(2003)
    sizes[:, 1] = sizes[:, 0] + sizes[:, 1] // 6  # a translation is about as long as its source
    plan = BucketPlan(sizes, max_tokens=500, batch=29, seed=1)
    padded = 0
    for step in range(plan.batches):
        samples = plan.at(step).samples
        tokens = len(samples) * sizes[samples].max(axis=0).sum()
        assert tokens <= 500
        assert len(samples) <= 29
        padded += tokens
    assert sizes.sum() / padded > 0.9
    shapes = [len(plan.at(step).samples) for step in range(plan.batches)]
    assert shapes != sorted(shapes, reverse=True), "short ones do not all come first"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FixedPlan(0, 3, 1), "count=0"),
        (lambda: FixedPlan(3, 0, 1), "batch=0"),
        (lambda: FixedPlan(3, 7, 1, last="drop"), "write 3 or less"),
        (lambda: FixedPlan(3, 1, 1).at(-1), "step=-1"),
        (lambda: FixedPlan(3, 1, 1).split(Batch(0, np.arange(3)), 2, 2), "rank=2"),
        (lambda: BucketPlan([3, 9], seed=1), "max_tokens"),
        (lambda: BucketPlan([3, 9], max_tokens=8, seed=1), "sample 1 has 9 tokens, more than max_tokens=8"),
        (lambda: BucketPlan([], batch=2, seed=1), "lengths of shape"),
        (lambda: Loader(FixedPlan(3, 1, 1), lambda batch: batch, workers=-1), "workers=-1"),
    ],
)
def test_what_cannot_be_is_one_line(make, said):
    with pytest.raises(InputError, match=said):
        make()


# The loader


def take(loader, count):
    found = iter(loader)
    return [next(found) for _ in range(count)]


def packed():
    """Blocks of packed documents and a plan over them; `make` gives sample ids and tokens."""
    chance = np.random.default_rng(1)
    tokens = Tokens.from_documents([chance.integers(1, 97, size=n) for n in chance.integers(2, 30, size=149)], 97)
    blocks = Blocks(tokens, 13, packing="documents")
    plan = FixedPlan(len(blocks), 5, seed=3)

    def make(batch):
        rows = [blocks.get(sample, batch.epoch, 3) for sample in batch.samples.tolist()]
        return batch.epoch, batch.samples.tolist(), torch.tensor(np.stack([row["ids"] for row in rows]))

    return plan, make


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_five_interruptions_neither_repeat_nor_skip(workers):
    plan, make = packed()
    total = plan.batches + plan.batches // 2
    unbroken = [make(plan.at(step)) for step in range(total)]
    stops = sorted(np.random.default_rng(workers).choice(np.arange(1, plan.batches), size=5, replace=False).tolist())
    log = []
    for start, stop in zip([0, *stops], [*stops, total], strict=True):
        log += take(Loader(plan, make, start=start, workers=workers), stop - start)
    assert [row[:2] for row in log] == [row[:2] for row in unbroken]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(log, unbroken, strict=True))
    first = [sample for epoch, samples, _ in log if epoch == 0 for sample in samples]
    assert sorted(first) == list(range(plan.count))


def slow_first(batch):
    """The earlier the sample, the later it is done: workers overtake each other."""
    time.sleep(0.02 if int(batch.samples[0]) % 2 else 0)
    return batch.samples.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order_and_stop_where_told(workers):
    plan = FixedPlan(40, 3, 1)
    found = list(Loader(plan, slow_first, start=4, stop=19, workers=workers))
    assert found == [plan.at(step).samples.tolist() for step in range(4, 19)]


def test_the_global_chance_is_left_alone():
    plan, make = packed()
    before = torch.get_rng_state()
    take(Loader(plan, make, workers=2), 3)
    assert torch.equal(torch.get_rng_state(), before)


def children():
    gc.collect()
    return len(multiprocessing.active_children())


def test_processes_end_when_the_user_stops_early():
    plan, make = packed()
    begun = time.monotonic()
    found = iter(Loader(plan, make, workers=2))
    next(found)
    assert children() == 2
    found.close()
    assert children() == 0
    take(Loader(plan, make, workers=2), 1)
    assert children() == 0
    assert time.monotonic() - begun < 30


def test_an_error_in_a_worker_is_the_one_line_it_would_be_without():
    def make(batch):
        if 3 in batch.samples:
            raise FileError("corpus.tsv, line 4: one column")
        return batch.samples.tolist()

    for workers in (0, 2):
        with pytest.raises(FileError, match=r"^corpus.tsv, line 4: one column$"):
            list(Loader(FixedPlan(7, 2, 0), make, stop=4, workers=workers))
    assert children() == 0
