"""Several linear layers of one input as one product."""

import pytest
from torch import nn

from monoblock.nn.linear import can_join


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_all_have_a_bias_or_none_can_be_joined(bias):
    layers = [nn.Linear(7, size, bias=bias) for size in (17, 5, 11)]
    assert can_join(layers)
    assert not can_join([layers[0], nn.Linear(7, 5, bias=not bias)])
    assert not can_join([layers[0], None])
