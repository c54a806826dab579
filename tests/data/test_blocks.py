"""Blocks: every token is predicted, documents never mix, and a sample depends only on (index, epoch, seed)."""

from itertools import pairwise

import numpy as np
import pytest

from monoblock.data.blocks import NO_DOCUMENT, BlockDataset, evaluation_windows
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import InputError

CONTEXT = 7


def numbered_tokens(*lengths):
    """Return documents of these lengths in which the id of each token is its position."""
    offsets = np.cumsum([0, *lengths]).tolist()
    return TokenDataset.from_documents([range(a, b) for a, b in pairwise(offsets)], vocab=offsets[-1] + 1)


@pytest.mark.parametrize("count", [8, 13, 14, 15, 103, 700])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_stream_predicts_no_token_twice_and_omits_less_than_a_block(count, epoch):
    blocks = BlockDataset(numbered_tokens(count), CONTEXT)
    rows = [blocks.sample(sample, epoch, 3)["ids"] for sample in range(len(blocks))]
    assert all(row.shape == (CONTEXT + 1,) and row.dtype == np.int64 for row in rows)
    assert all(((row[1:] - row[:-1]) % count == 1).all() for row in rows), "contiguous, except at the end"
    targets = [int(token) for row in rows for token in row[1:]]
    assert len(targets) == len(set(targets)) == count - count % CONTEXT


def test_over_the_epochs_a_stream_predicts_every_token():
    blocks = BlockDataset(numbered_tokens(20), CONTEXT)
    seen = {int(t) for epoch in range(40) for s in range(len(blocks)) for t in blocks.sample(s, epoch, 1)["ids"][1:]}
    assert seen == set(range(20))


def test_every_epoch_has_another_offset():
    blocks = BlockDataset(numbered_tokens(1000), 101)
    offsets = [blocks.epoch_offset(epoch, seed=2) for epoch in range(50)]
    assert all(0 <= offset < 101 for offset in offsets)
    assert len(set(offsets)) > 30
    assert offsets != [blocks.epoch_offset(epoch, seed=3) for epoch in range(50)]


def test_a_sample_is_a_pure_function():
    blocks, again = (BlockDataset(numbered_tokens(103), CONTEXT) for _ in range(2))
    expected = blocks.sample(5, 2, 9)["ids"]
    for other in (3, 11, 0):
        again.sample(other, 7, 1)
    assert again.sample(5, 2, 9)["ids"].tolist() == expected.tolist()


def targets_of(row):
    """Return the targets by the rule in the docstring of `BlockDataset.sample`."""
    documents = row["documents"]
    is_target = (documents[1:] == documents[:-1]) & (documents[1:] != NO_DOCUMENT)
    return row["ids"][1:][is_target]


LENGTHS = (3, 20, 1, 8, 9, 0, 2, 5, 7, 15, 6, 4, 4, 22)


def test_packing_never_mixes_documents_and_predicts_every_token_but_the_first_of_each():
    tokens = numbered_tokens(*LENGTHS)
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    blocks = BlockDataset(tokens, CONTEXT, packing="documents")
    targets = []
    for sample in range(len(blocks)):
        row = blocks.sample(sample, 0, 0)
        assert row["ids"].shape == row["documents"].shape == (CONTEXT + 1,)
        valid = row["documents"] != NO_DOCUMENT
        assert not row["ids"][~valid].any()
        for number in set(row["documents"][valid].tolist()):
            ids = row["ids"][row["documents"] == number]
            assert len(set(owner[ids].tolist())) == 1, "one document per number"
            assert (np.diff(ids) == 1).all(), "contiguous"
        targets += targets_of(row).tolist()
    starts = set(np.cumsum([0, *LENGTHS])[:-1].tolist())
    assert sorted(targets) == [token for token in range(sum(LENGTHS)) if token not in starts]


def test_packing_wastes_little():
    rng = np.random.default_rng(0)
    tokens = numbered_tokens(*rng.integers(2, 60, size=997).tolist())
    blocks = BlockDataset(tokens, 63, packing="documents")
    assert len(tokens) / (len(blocks) * 64) > 0.95


def test_packing_is_the_same_every_time():
    tokens = numbered_tokens(*LENGTHS)
    first, second = (BlockDataset(tokens, CONTEXT, packing="documents") for _ in range(2))
    for sample in range(len(first)):
        for key, value in first.sample(sample, 3, 1).items():
            assert value.tolist() == second.sample(sample, 8, 2)[key].tolist()


@pytest.mark.parametrize("count", [2, 7, 8, 9, 50, 103])
@pytest.mark.parametrize("stride", [None, 1, 3, 7])
def test_evaluation_counts_every_target_once(count, stride):
    targets, contexts = [], []
    for window in evaluation_windows(numbered_tokens(count), CONTEXT, stride):
        assert len(window.ids) <= CONTEXT + 1
        assert window.num_targets >= 1
        targets += window.ids[len(window.ids) - window.num_targets :].tolist()
        contexts.append(len(window.ids) - window.num_targets)
    assert targets == list(range(1, count))
    assert all(length >= CONTEXT + 1 - (stride or CONTEXT) for length in contexts[1:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockDataset(numbered_tokens(7), 7), "7 tokens are too few for context=7"),
        (lambda: BlockDataset(numbered_tokens(9), 0), "context=0"),
        (lambda: BlockDataset(numbered_tokens(1, 1), 4, packing="documents"), "nothing to predict"),
        (lambda: BlockDataset(numbered_tokens(9), 4, packing="rows"), "'stream', 'contiguous' or 'documents'"),
        (lambda: BlockDataset(numbered_tokens(9), 4).sample(2, 0, 0), "index=2 is out of range; write 0 to 1"),
        (lambda: list(evaluation_windows(numbered_tokens(9), 4, 5)), "stride=5"),
    ],
)
def test_invalid_arguments_raise_one_line(make, message):
    with pytest.raises(InputError, match=message):
        make()
