"""The profile attributes every second and every byte to a component."""

import pytest
import torch

import monoblock as mb
from monoblock.config.presets import PRESETS
from monoblock.inspection.profile import profile


@pytest.mark.parametrize("name", PRESETS)
def test_the_components_of_a_profile_add_up_to_the_total(name):
    config = mb.tiny(name)
    ids = torch.randint(1, 61, (2, 13))
    inputs = {"vision": (torch.zeros(2, 3, 12, 12),), "encoder-decoder": (ids[:, :11], ids)}.get(config.family, (ids,))
    costs = profile(mb.Transformer(config), *inputs, rounds=1)
    total = costs.pop("total")
    assert abs(sum(cost.seconds for cost in costs.values()) - total.seconds) < 1e-9
    assert sum(cost.kept_bytes for cost in costs.values()) == total.kept_bytes > 0
    components = {f"{stack}.{kind}" for stack in config.stacks for kind in ("attention", "feedforward", "block_norms")}
    assert components <= set(costs)
    assert all(costs[name].seconds > 0 for name in components)


def test_unfused_attention_saves_four_times_the_bytes_at_twice_the_length():
    """With softcapped scores no fused kernel applies, so the score matrices are saved for backward."""
    model = mb.Transformer(mb.gpt(vocab=23, width=12, depth=1, heads=3, context=512, softcap=30.0, positions="none"))

    def saved_bytes(length):
        return profile(model, torch.ones(1, length, dtype=torch.long), rounds=1)["decoder.attention"].kept_bytes

    assert 3.5 < saved_bytes(512) / saved_bytes(256) < 4.1
