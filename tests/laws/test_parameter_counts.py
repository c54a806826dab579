"""The closed form, the built model and the published count agree."""

import pytest
import torch
from support import law_names, preset_names, tiny_config, tiny_model

from monoblock.accounting.report import account
from monoblock.config.presets import PRESETS
from monoblock.model import Transformer


def count_built(config):
    """The number of parameters of a model on the meta device."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


@pytest.mark.parametrize("name", preset_names())
def test_the_published_count_is_the_closed_form_and_the_built_model(name):
    row = PRESETS[name]
    assert row.parameters == account(row.config).parameters == count_built(row.config)


@pytest.mark.parametrize("name", law_names())
def test_the_closed_form_counts_tiny_models_too(name):
    config = tiny_config(name)
    assert (
        account(config).parameters
        == count_built(config)
        == sum(weight.numel() for weight in tiny_model(name).parameters())
    )
