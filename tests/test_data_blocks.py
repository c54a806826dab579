"""Blocks: every token is predicted, documents never mix, and a sample depends on nothing but its numbers."""

from itertools import pairwise

import numpy as np
import pytest

from monoblock.data.blocks import NO_DOCUMENT, Blocks, evaluation_blocks
from monoblock.data.shards import Tokens
from monoblock.errors import InputError

CONTEXT = 7


def numbered(*lengths):
    """Documents of these lengths whose ids are places: each id occurs once."""
    ends = np.cumsum([0, *lengths]).tolist()
    return Tokens.from_documents([range(a, b) for a, b in pairwise(ends)], vocab=ends[-1] + 1)


@pytest.mark.parametrize("count", [8, 13, 14, 15, 103, 700])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_stream_predicts_no_token_twice_and_leaves_out_less_than_a_block(count, epoch):
    blocks = Blocks(numbered(count), CONTEXT)
    rows = [blocks.get(sample, epoch, 3)["ids"] for sample in range(len(blocks))]
    assert all(row.shape == (CONTEXT + 1,) and row.dtype == np.int64 for row in rows)
    assert all(((row[1:] - row[:-1]) % count == 1).all() for row in rows), "contiguous, but for the end"
    targets = [int(token) for row in rows for token in row[1:]]
    assert len(targets) == len(set(targets)) == count - count % CONTEXT


def test_over_the_epochs_a_stream_predicts_every_token():
    blocks = Blocks(numbered(20), CONTEXT)
    seen = {int(t) for epoch in range(40) for s in range(len(blocks)) for t in blocks.get(s, epoch, 1)["ids"][1:]}
    assert seen == set(range(20))


def test_every_epoch_cuts_elsewhere():
    blocks = Blocks(numbered(1000), 101)
    offsets = [blocks.offset(epoch, seed=2) for epoch in range(50)]
    assert all(0 <= offset < 101 for offset in offsets)
    assert len(set(offsets)) > 30
    assert offsets != [blocks.offset(epoch, seed=3) for epoch in range(50)]


def test_a_sample_is_a_pure_function():
    blocks, again = (Blocks(numbered(103), CONTEXT) for _ in range(2))
    wanted = blocks.get(5, 2, 9)["ids"]
    for other in (3, 11, 0):
        again.get(other, 7, 1)
    assert again.get(5, 2, 9)["ids"].tolist() == wanted.tolist()


def targets_that_count(row):
    """By the rule that `get` states."""
    numbers = row["documents"]
    counts = (numbers[1:] == numbers[:-1]) & (numbers[1:] != NO_DOCUMENT)
    return row["ids"][1:][counts]


LENGTHS = (3, 20, 1, 8, 9, 0, 2, 5, 7, 15, 6, 4, 4, 22)


def test_packing_never_mixes_documents_and_predicts_every_token_but_the_first_of_each():
    tokens = numbered(*LENGTHS)
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    blocks = Blocks(tokens, CONTEXT, packing="documents")
    found = []
    for sample in range(len(blocks)):
        row = blocks.get(sample, 0, 0)
        assert row["ids"].shape == row["documents"].shape == (CONTEXT + 1,)
        real = row["documents"] != NO_DOCUMENT
        assert not row["ids"][~real].any()
        for number in set(row["documents"][real].tolist()):
            ids = row["ids"][row["documents"] == number]
            assert len(set(owner[ids].tolist())) == 1, "one document under one number"
            assert (np.diff(ids) == 1).all(), "in one piece"
        found += targets_that_count(row).tolist()
    starts = set(np.cumsum([0, *LENGTHS])[:-1].tolist())
    assert sorted(found) == [token for token in range(sum(LENGTHS)) if token not in starts]


def test_packing_wastes_little():
    chance = np.random.default_rng(0)
    tokens = numbered(*chance.integers(2, 60, size=997).tolist())
    blocks = Blocks(tokens, 63, packing="documents")
    assert len(tokens) / (len(blocks) * 64) > 0.95


def test_packing_is_the_same_every_time():
    tokens = numbered(*LENGTHS)
    one, other = (Blocks(tokens, CONTEXT, packing="documents") for _ in range(2))
    for sample in range(len(one)):
        for key, value in one.get(sample, 3, 1).items():
            assert value.tolist() == other.get(sample, 8, 2)[key].tolist()


@pytest.mark.parametrize("count", [2, 7, 8, 9, 50, 103])
@pytest.mark.parametrize("stride", [None, 1, 3, 7])
def test_evaluation_counts_every_target_once(count, stride):
    found, before = [], []
    for window in evaluation_blocks(numbered(count), CONTEXT, stride):
        assert len(window.ids) <= CONTEXT + 1
        assert window.targets >= 1
        found += window.ids[len(window.ids) - window.targets :].tolist()
        before.append(len(window.ids) - window.targets)
    assert found == list(range(1, count))
    assert all(given >= CONTEXT + 1 - (stride or CONTEXT) for given in before[1:])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Blocks(numbered(7), 7), "7 tokens are too few for a context of 7"),
        (lambda: Blocks(numbered(9), 0), "context=0"),
        (lambda: Blocks(numbered(1, 1), 4, packing="documents"), "nothing to predict"),
        (lambda: Blocks(numbered(9), 4, packing="rows"), "'stream' or 'documents'"),
        (lambda: Blocks(numbered(9), 4).get(2, 0, 0), "no sample 2; there are 2"),
        (lambda: list(evaluation_blocks(numbered(9), 4, 5)), "stride=5"),
    ],
)
def test_what_cannot_be_is_one_line(make, said):
    with pytest.raises(InputError, match=said):
        make()
