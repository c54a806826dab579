"""The measured profile charges every second and every byte to a component."""

import pytest
import torch

import monoblock as mb
from monoblock.inspection.profile import profile
from monoblock.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_the_components_of_a_profile_add_up_to_the_whole(name):
    config = mb.tiny(name)
    ids = torch.randint(1, 61, (2, 13))
    inputs = {"vision": (torch.zeros(2, 3, 12, 12),), "encoder-decoder": (ids[:, :11], ids)}.get(config.family, (ids,))
    parts = profile(mb.Transformer(config), *inputs, rounds=1)
    total = parts.pop("total")
    assert abs(sum(part.seconds for part in parts.values()) - total.seconds) < 1e-9
    assert sum(part.kept_bytes for part in parts.values()) == total.kept_bytes > 0
    wanted = {f"{stack}.{part}" for stack in config.stacks for part in ("attention", "feedforward", "block_norms")}
    assert wanted <= set(parts)
    assert all(parts[part].seconds > 0 for part in wanted)


def test_attention_keeps_four_times_the_matrices_at_twice_the_length_on_the_plain_path():
    """With softcapped scores no fused kernel applies, so the matrices themselves are kept for backward."""
    model = mb.Transformer(mb.gpt(vocab=23, width=12, depth=1, heads=3, context=512, softcap=30.0, positions="none"))

    def kept(length):
        return profile(model, torch.ones(1, length, dtype=torch.long), rounds=1)["decoder.attention"].kept_bytes

    assert 3.5 < kept(512) / kept(256) < 4.1
