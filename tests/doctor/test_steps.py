"""Training steps, losses and labels that are handed over with a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb

VOCAB, WIDTH = 67, 32
TOKENS = torch.randint(5, VOCAB, (4, 14), generator=torch.Generator().manual_seed(0))
BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


class Model(nn.Module):
    def __init__(self, forgets=False):
        super().__init__()
        self.token, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.gru, self.norm, self.forgets = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(WIDTH), forgets

    def forward(self, ids):
        return self.step(ids)[0]

    def step(self, ids, state=None):
        x, state = self.gru(self.norm(self.token(ids).mT).mT, None if self.forgets else state)
        return self.head(x), state


def training(lr=1e-3, calls=True, every=1, sign=1.0):
    """Return a model, its optimizer and a step that updates the weights in each of `every` calls."""
    torch.manual_seed(0)
    model, count = Model(), iter(range(1, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step():
        loss = sign * F.cross_entropy(model.train()(BATCH[0]).flatten(0, 1), BATCH[1].flatten())
        loss.backward()
        if calls and next(count) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, step


def reasons(report):
    return {finding.check: finding.reason for finding in report.findings if finding.check != "batch"}  # of the norm


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": 0.0}, "the learning rate is 0"), ({"calls": False}, "optimizer.step() is not called"), ({}, None)],
)
def test_a_step_that_moves_nothing_is_found_with_its_optimizer(options, words):
    model, optimizer, step = training(**options)
    found = reasons(mb.diagnose(model, optimizer=optimizer, step=step))
    assert set(found) == ({"optimizer"} if words else set())
    assert words is None or words in found["optimizer"]


def test_a_step_may_add_gradients_up_and_a_loss_may_be_negative():
    model, optimizer, step = training(every=4)
    assert not reasons(mb.diagnose(model, optimizer=optimizer, step=step))
    model, optimizer, step = training(sign=-1.0)
    assert not reasons(mb.diagnose(model, step=step, checks="learning_rate"))


def test_an_examination_puts_buffers_and_the_state_of_the_optimizer_back():
    model, optimizer, step = training()
    step()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    mb.diagnose(model, optimizer=optimizer, step=step, batch=BATCH)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    after = list(optimizer.state.values())
    assert [int(state["step"]) for state in after] == [1] * len(moments)
    assert all(torch.equal(state["exp_avg"], moment) for state, moment in zip(after, moments, strict=True))


def sum_of_losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_sum_of_losses_and_labels_the_wrong_way_are_named():
    torch.manual_seed(0)
    assert "a sum over 52 tokens" in reasons(mb.diagnose(Model(), batch=BATCH, loss=sum_of_losses))["initial_loss"]
    assert "the wrong way" in reasons(mb.diagnose(Model(), batch=BATCH[::-1]))["label_shift"]


def test_a_recurrent_step_without_its_state_is_not_told_of_keys_and_values():
    torch.manual_seed(0)
    for forgets in (False, True):
        model = Model(forgets).eval()
        found = reasons(mb.diagnose(model, cached=model.step))
        assert set(found) == ({"cache"} if forgets else set())
    assert "the state of the step before" in found["cache"]
