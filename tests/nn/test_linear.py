"""Several linear layers of one input as one product."""

import pytest
import torch
from torch import nn

from monoblock.nn.linear import can_join, join_weights


@pytest.mark.parametrize("bias", [True, False])
def test_joined_weights_concatenate_the_outputs(bias):
    layers = [nn.Linear(7, size, bias=bias) for size in (17, 5, 11)]
    x = torch.randn(2, 3, 7)
    weight, joined_bias = join_weights(layers)
    assert (joined_bias is not None) == bias
    torch.testing.assert_close(nn.functional.linear(x, weight, joined_bias), torch.cat([f(x) for f in layers], -1))
    assert not can_join([layers[0], nn.Linear(7, 5, bias=not bias)])
    assert not can_join([layers[0], None])
