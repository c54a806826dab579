"""Several linear layers of one input as one product."""

import pytest
import torch
from torch import nn

from monoblock.nn.linear import FUSE_MIN_TOKENS, can_join, fused_linear, join_weights, should_fuse


@pytest.mark.parametrize("bias", [True, False])
def test_fused_layers_have_the_outputs_and_gradients_of_separate_ones(bias):
    torch.manual_seed(0)
    layers = [nn.Linear(7, size, bias=bias).double() for size in (5, 3, 11)]
    x = torch.randn(2, 13, 7, dtype=torch.double, requires_grad=True)
    expected, actual = [layer(x) for layer in layers], fused_linear(x, layers)
    weights = [x, *(weight for layer in layers for weight in layer.parameters())]
    for first, second in zip(expected, actual, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-12)
    sums = [sum(out.sin().sum() for out in outs) for outs in (expected, actual)]
    for first, second in zip(*(torch.autograd.grad(total, weights) for total in sums), strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-12)


def test_layers_are_fused_for_many_tokens_and_layers_of_one_kind():
    first, second, without_bias = nn.Linear(7, 5), nn.Linear(7, 3), nn.Linear(7, 3, bias=False)
    x = torch.zeros(2, FUSE_MIN_TOKENS // 2, 7)
    assert should_fuse(x, (first, second))
    assert not should_fuse(x[:, 1:], (first, second))
    assert not should_fuse(x, (first, without_bias))
    assert not should_fuse(x, (first, nn.Identity()))


@pytest.mark.parametrize("bias", [True, False])
def test_joined_weights_concatenate_the_outputs(bias):
    layers = [nn.Linear(7, size, bias=bias) for size in (17, 5, 11)]
    x = torch.randn(2, 3, 7)
    weight, joined_bias = join_weights(layers)
    assert (joined_bias is not None) == bias
    torch.testing.assert_close(nn.functional.linear(x, weight, joined_bias), torch.cat([f(x) for f in layers], -1))
    assert not can_join([layers[0], nn.Linear(7, 5, bias=not bias)])
    assert not can_join([layers[0], None])
