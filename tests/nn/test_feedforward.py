"""The feed-forward network against its formula; every activation against torch's module or its formula."""

import math

import pytest
import torch
from support import assert_near, randomize_weights
from torch import nn
from torch.autograd import gradcheck

from monoblock.config.model import FeedForwardConfig
from monoblock.config.parts import Activation
from monoblock.nn.feedforward import ACTIVATIONS, FeedForward

B, T, D, F = 2, 3, 5, 7
REFERENCES = {
    "relu": nn.ReLU(),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": nn.SiLU(),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": nn.Tanh(),
    "identity": nn.Identity(),
}


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build(**options):
    return randomize_weights(FeedForward(D, FeedForwardConfig(hidden=F, **options)).double())


def test_every_activation_of_the_configuration_is_in_the_table():
    assert set(ACTIVATIONS) == set(Activation.__args__) == set(REFERENCES)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name):
    x = 3 * randn(101)
    assert_near(ACTIVATIONS[name](x), REFERENCES[name](x))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_network_is_down_of_the_activated_up(name, bias):
    network, x = build(activation=name, bias=bias), randn(B, T, D)
    hidden = REFERENCES[name](nn.functional.linear(x, network.up.weight, network.up.bias))
    assert_near(network(x), nn.functional.linear(hidden, network.down.weight, network.down.bias))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gated_network_multiplies_the_activated_gate_with_up(name):
    network, x = build(activation=name, gated=True), randn(B, T, D)
    hidden = REFERENCES[name](x @ network.gate.weight.T + network.gate.bias)
    hidden = hidden * (x @ network.up.weight.T + network.up.bias)
    assert_near(network(x), hidden @ network.down.weight.T + network.down.bias)


@pytest.mark.parametrize("gated", [True, False])
def test_all_projections_have_a_bias_or_none(gated):
    names = {"up", "down"} | ({"gate"} if gated else set())
    weights = {f"{name}.weight" for name in names}
    assert set(build(gated=gated, bias=False).state_dict()) == weights
    assert set(build(gated=gated).state_dict()) == weights | {f"{name}.bias" for name in names}


def test_dropout_acts_in_training_only():
    network, x = build(dropout=0.5), randn(B, T, D)
    assert torch.equal(network.eval()(x), network(x))
    assert not torch.equal(network.train()(x), network(x))


def test_tokens_are_independent():
    network, x = build(gated=True), randn(B, T, D)
    assert_near(network(x)[1:, 2:], network(x[1:, 2:]))


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_those_of_finite_differences(gated):
    assert gradcheck(build(activation="silu", gated=gated), (randn(B, T, D).requires_grad_(),))
