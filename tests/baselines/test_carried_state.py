"""The state of an LSTM language model is carried from batch to batch, and a text is divided into rows that continue."""

import itertools

import numpy as np
import pytest
import torch
from support import assert_near

from monoblock.baselines.carried import CarriedLoss
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import RecurrentConfig
from monoblock.data.batches import ContiguousBatchPlan
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.token_folder import TokenDataset
from monoblock.tasks.task_data import iterate_lanes


def rows(ids, block):
    count = len(ids)
    return {"source": ids, "lanes": torch.arange(count), "blocks": torch.full((count,), block)}


def test_logits_in_pieces_are_those_of_the_whole_text_and_of_torchs_lstm():
    model, loss = Recurrent(RecurrentConfig(vocab=11, width=6)).double().eval(), CarriedLoss()
    ids = torch.randint(11, (3, 20))
    pieces = [loss.compute_logits(model, rows(piece, n)) for n, piece in enumerate(ids.split(5, 1))]
    reference = torch.nn.LSTM(6, 6, 2, batch_first=True).double()
    reference.load_state_dict(model.decoder.state_dict())
    expected = reference(model.input(ids))[0] @ model.input.weight.T + model.bias
    assert_near(torch.cat(pieces, 1), expected)
    assert_near(torch.cat(pieces, 1), model(ids))


def test_gradients_stop_at_the_batch_and_a_repeated_batch_starts_from_the_same_state():
    model, loss = Recurrent(RecurrentConfig(vocab=11, width=6)).double(), CarriedLoss()
    ids = torch.randint(11, (2, 10))
    loss.compute_logits(model, rows(ids[:, :5], 0))
    first = loss.compute_logits(model, rows(ids[:, 5:], 1))
    again = torch.cat([loss.compute_logits(model, {k: v[[n]] for k, v in rows(ids[:, 5:], 1).items()}) for n in (0, 1)])
    assert_near(again, first)
    assert all(not tensor.requires_grad for tensor in loss.carried.tensors.values())
    assert not loss.evaluation_loss().carried.tensors
    assert_near(loss.compute_logits(model, rows(ids[:, :5], 0)), model(ids[:, :5]))  # block 0 starts from zeros


def test_every_row_of_a_plan_continues_and_each_sample_is_visited_once():
    plan = ContiguousBatchPlan(14, 4)
    batches = [plan.batch_at(step).indices for step in range(plan.batches)]
    assert plan.batches == 3
    assert all((after == before + 1).all() for before, after in itertools.pairwise(batches))
    assert len(np.unique(np.concatenate(batches))) == 12
    assert plan.batch_at(3).epoch == 1


@pytest.mark.parametrize(("length", "batch"), [(50, 3), (49, 4), (7, 3), (2, 1)])
def test_every_token_but_the_first_is_a_label_once(length, batch):
    tokens = TokenDataset.from_documents([list(range(length))], 64)
    labels = torch.cat([part.labels.flatten() for part in iterate_lanes(tokens, 5, batch)])
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(1, length))
