"""Batches of similar length: every index once, sorted by length, and a fixed order for evaluations."""

import random

import pytest

from monoblock.tasks.task_data import group_by_length, group_for_evaluation

LENGTHS = random.Random(3).choices(range(1, 31), k=53)


@pytest.mark.parametrize("longest_first", [True, False])
@pytest.mark.parametrize("batch", [1, 7, 53, 64])
def test_batches_hold_every_index_once_in_order_of_length(batch, longest_first):
    groups = group_by_length(LENGTHS, batch, longest_first=longest_first)
    order = [index for group in groups for index in group]
    assert sorted(order) == list(range(len(LENGTHS)))
    assert order == sorted(order, key=lambda index: (-LENGTHS[index] if longest_first else LENGTHS[index], index))
    assert [len(group) for group in groups[:-1]] == [batch] * (len(groups) - 1)


def test_no_inputs_make_no_batches():
    assert group_by_length([], 7) == []


def test_an_evaluation_shuffles_the_batches_but_not_their_content():
    shuffled, groups = group_for_evaluation(LENGTHS, 5), group_by_length(LENGTHS, 5, longest_first=False)
    assert shuffled != groups
    assert sorted(shuffled) == sorted(groups)
    assert shuffled == group_for_evaluation(LENGTHS, 5)
