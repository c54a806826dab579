"""Closed form = built model = published count."""

import pytest
import torch
from support import presets, toy

from monoblock.accounting.report import account
from monoblock.model import Transformer
from monoblock.presets import PRESETS, tiny


def built(config):
    """Parameters of the model, made without memory."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


@pytest.mark.parametrize("name", presets())
def test_the_published_count_is_the_closed_form_and_the_built_model(name):
    row = PRESETS[name]
    assert row.parameters == account(row.config).parameters == built(row.config)


@pytest.mark.parametrize("name", presets())
def test_the_toy_is_counted_like_the_real_thing(name):
    config = tiny(name)
    assert account(config).parameters == built(config) == sum(weight.numel() for weight in toy(name).parameters())
