"""Layers of one input as one product."""

import pytest
import torch
from torch import nn

from monoblock.linear import JOIN_FROM, joined, worth_joining


@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_give_what_they_give_apart_and_the_same_gradients(bias):
    torch.manual_seed(0)
    layers = [nn.Linear(7, size, bias=bias).double() for size in (5, 3, 11)]
    x = torch.randn(2, 13, 7, dtype=torch.double, requires_grad=True)
    wanted, found = [layer(x) for layer in layers], joined(x, layers)
    weights = [x, *(weight for layer in layers for weight in layer.parameters())]
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    sums = [sum(out.sin().sum() for out in outs) for outs in (wanted, found)]
    for one, two in zip(*(torch.autograd.grad(total, weights) for total in sums), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)


def test_joining_waits_for_many_tokens_and_layers_of_one_kind():
    one, two, odd = nn.Linear(7, 5), nn.Linear(7, 3), nn.Linear(7, 3, bias=False)
    many = torch.zeros(2, JOIN_FROM // 2, 7)
    assert worth_joining(many, (one, two))
    assert not worth_joining(many[:, 1:], (one, two))
    assert not worth_joining(many, (one, odd))
    assert not worth_joining(many, (one, nn.Identity()))
