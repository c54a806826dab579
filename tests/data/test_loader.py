"""The batch loader: same batches in order with any number of workers and interruptions."""

import gc
import multiprocessing
import time

import numpy as np
import pytest
import torch

from monoblock.data.batches import BatchLoader, FixedBatchPlan
from monoblock.data.blocks import BlockDataset
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import FileError, InputError


def take(loader, count):
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def packed_plan():
    """Return a plan over blocks of packed documents, and a function that makes (epoch, samples, ids) of a batch."""
    rng = np.random.default_rng(1)
    tokens = TokenDataset.from_documents([rng.integers(1, 97, size=n) for n in rng.integers(2, 30, size=149)], 97)
    blocks = BlockDataset(tokens, 13, packing="documents")
    plan = FixedBatchPlan(len(blocks), 5, seed=3)

    def make_batch(batch):
        rows = [blocks.sample(sample, batch.epoch, 3) for sample in batch.indices.tolist()]
        return batch.epoch, batch.indices.tolist(), torch.tensor(np.stack([row["ids"] for row in rows]))

    return plan, make_batch


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_five_interruptions_neither_repeat_nor_skip(workers):
    plan, make_batch = packed_plan()
    total = plan.batches + plan.batches // 2
    uninterrupted = [make_batch(plan.batch_at(step)) for step in range(total)]
    stops = sorted(np.random.default_rng(workers).choice(np.arange(1, plan.batches), size=5, replace=False).tolist())
    log = []
    for start, stop in zip([0, *stops], [*stops, total], strict=True):
        log += take(BatchLoader(plan, make_batch, start=start, workers=workers), stop - start)
    assert [row[:2] for row in log] == [row[:2] for row in uninterrupted]
    assert all(torch.equal(row[2], expected[2]) for row, expected in zip(log, uninterrupted, strict=True))
    first = [sample for epoch, samples, _ in log if epoch == 0 for sample in samples]
    assert sorted(first) == list(range(plan.count))


def slow_if_odd(batch):
    """Make some batches slow, so that workers overtake each other."""
    time.sleep(0.02 if int(batch.indices[0]) % 2 else 0)
    return batch.indices.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order_until_stop(workers):
    plan = FixedBatchPlan(40, 3, 1)
    batches = list(BatchLoader(plan, slow_if_odd, start=4, stop=19, workers=workers))
    assert batches == [plan.batch_at(step).indices.tolist() for step in range(4, 19)]


def test_the_global_generator_is_unchanged():
    plan, make_batch = packed_plan()
    before = torch.get_rng_state()
    take(BatchLoader(plan, make_batch, workers=2), 3)
    assert torch.equal(torch.get_rng_state(), before)


def count_processes():
    gc.collect()
    return len(multiprocessing.active_children())


def test_processes_end_when_the_user_stops_early():
    plan, make_batch = packed_plan()
    batches = iter(BatchLoader(plan, make_batch, workers=2))
    next(batches)
    assert count_processes() == 2
    batches.close()
    assert count_processes() == 0
    take(BatchLoader(plan, make_batch, workers=2), 1)
    assert count_processes() == 0


def test_an_error_in_a_worker_is_the_same_line_as_without_workers():
    def make_batch(batch):
        if 3 in batch.indices:
            raise FileError("corpus.tsv, line 4: one column")
        return batch.indices.tolist()

    for workers in (0, 2):
        with pytest.raises(FileError, match=r"^corpus.tsv, line 4: one column$"):
            list(BatchLoader(FixedBatchPlan(7, 2, 0), make_batch, stop=4, workers=workers))
    assert count_processes() == 0


def test_a_negative_number_of_workers_raises():
    with pytest.raises(InputError, match="workers=-1"):
        BatchLoader(FixedBatchPlan(3, 1, 1), lambda batch: batch, workers=-1)
