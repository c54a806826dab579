"""The feed-forward network with products in 8 bits: the same as two linear layers; on a CPU, by the plain formula."""

import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.kernels.fp8_feedforward import fp8_feedforward
from monoblock.kernels.fp8_linear import fp8_linear, fp8_products

BF16 = torch.bfloat16


@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_two_linear_layers_with_gelu_between(has_bias):
    torch.manual_seed(0)
    shapes = ((64, 32), (128, 32), (128,), (32, 128), (32,))
    x, up, up_bias, down, down_bias = (torch.randn(shape).requires_grad_() for shape in shapes)
    biases = (up_bias, down_bias) if has_bias else (None, None)
    grad = torch.randn(64, 32).to(BF16)
    with torch.autocast("cpu", BF16), fp8_products():
        found = fp8_feedforward(x, up, biases[0], down, biases[1])
        hidden = F.gelu(fp8_linear(x, up, biases[0]), approximate="tanh")
        expected = fp8_linear(hidden, down, biases[1])
    assert torch.equal(found, expected)
    weights = [x, up, down, *(bias for bias in biases if bias is not None)]
    for one, other in zip(*(torch.autograd.grad(out, weights, grad) for out in (found, expected)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [({}, True), ({"activation": "gelu"}, False), ({"dropout": 0.1}, False), ({"gated": True}, False)],
)
def test_it_is_used_for_networks_with_gelu_and_nothing_else(changes, is_used, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "monoblock.nn.feedforward.fp8_feedforward", lambda *args: calls.append(1) or fp8_feedforward(*args)
    )
    config = mb.vary(mb.gpt(vocab=64, width=32, depth=2, heads=2, context=16, activation="gelu_tanh"), **changes)
    model = mb.Transformer(config).train()
    ids = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", BF16), fp8_products():
        model(ids)
        assert bool(calls) == is_used
        calls.clear()
        model.decoder.blocks[0].feedforward.up.register_forward_hook(lambda *_: None)
        model(ids)
    assert len(calls) == (1 if is_used else 0)
