"""Every weight starts from the distribution its scheme names, in every preset."""

import math

import pytest
import torch
from support import blocks, presets

from monoblock.config import InitConfig
from monoblock.families import gpt, t5, vaswani
from monoblock.initialize import ALWAYS, SCHEMES, initialize
from monoblock.knobs import rebuild, vary
from monoblock.model import Transformer
from monoblock.presets import tiny


def fresh(config, seed=0):
    torch.manual_seed(seed)
    return Transformer(config)


def spread(weight):
    return weight.detach().std().item()


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("kind", SCHEMES)
def test_every_scheme_reaches_every_weight_of_every_preset(name, kind):
    def edit(part, values):
        if isinstance(part, InitConfig):
            values["kind"] = kind

    model = fresh(rebuild(tiny(name), edit))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
        for module in model.modules():
            if hasattr(module, "reset"):
                module.reset()
    initialize(model, model.config)
    drawn = {key: weight for key, weight in model.named_parameters() if not key.endswith(("_gain", ".sinks"))}
    assert all(weight.isfinite().all() for weight in drawn.values())
    assert all(weight.any() for key, weight in drawn.items() if weight.dim() > 1 and not key.endswith("bias"))


@pytest.mark.parametrize("name", presets())
def test_biases_start_at_zero_and_norms_as_the_identity(name):
    model = fresh(tiny(name))
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            assert not weight.any(), key
    units = {block.norm.unit_offset for block in blocks(model.config)}
    for key, weight in model.named_parameters():
        if key.endswith("norm.weight") and len(units) == 1:
            assert (weight == (0.0 if units == {True} else 1.0)).all(), key


def test_gpt2_shrinks_what_is_added_by_the_number_of_additions():
    model = fresh(gpt(vocab=211, width=128, depth=4, heads=4, context=67))
    assert spread(model.input.token.weight) == pytest.approx(0.02, rel=0.05)
    block = model.decoder.blocks[2]
    assert spread(block.attention.query.weight) == pytest.approx(0.02, rel=0.05)
    for added in (block.attention.output, block.feedforward.down):
        assert spread(added.weight) == pytest.approx(0.02 / math.sqrt(2 * 4), rel=0.05)


def test_xavier_is_uniform_by_fan_in_and_fan_out():
    model = fresh(vaswani(vocab=211, width=128, depth=1, heads=4))
    up = model.decoder.blocks[0].feedforward.up.weight
    bound = math.sqrt(6 / (128 + 512))
    assert up.abs().max() <= bound
    assert spread(up) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert spread(model.input.token.weight) == pytest.approx(128**-0.5, rel=0.05)


def test_stacked_experts_are_each_drawn_as_one_matrix():
    model = fresh(vary(vaswani(vocab=211, width=64, depth=1, heads=4), experts=3))
    up = model.decoder.blocks[0].feedforward.up
    assert up.abs().max() <= math.sqrt(6 / (64 + 256))
    assert spread(up) == pytest.approx(math.sqrt(2 / (64 + 256)), rel=0.05)


def test_t5_puts_the_missing_scale_into_its_queries():
    model = fresh(t5(vocab=211, width=128, depth=1, heads=4, hidden=256))
    attention = model.decoder.blocks[0].attention
    assert spread(attention.query.weight) == pytest.approx((128 * 32) ** -0.5, rel=0.05)
    assert spread(attention.key.weight) == pytest.approx(128**-0.5, rel=0.05)
    assert spread(model.decoder.blocks[0].feedforward.down.weight) == pytest.approx(256**-0.5, rel=0.05)
    assert spread(model.input.token.weight) == pytest.approx(1.0, rel=0.05)


def test_the_small_scheme_is_that_of_gpt_neox():
    model = fresh(vary(gpt(vocab=211, width=128, depth=4, heads=4, context=67), init="small"))
    assert spread(model.decoder.blocks[0].attention.key.weight) == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.05)
    assert spread(model.decoder.blocks[0].feedforward.down.weight) == pytest.approx(2 / (4 * math.sqrt(128)), rel=0.05)


def test_the_std_is_a_choice():
    model = fresh(vary(gpt(vocab=211, width=128, depth=1, heads=4, context=67), std=0.1))
    assert spread(model.input.token.weight) == pytest.approx(0.1, rel=0.05)


def test_every_table_ends_with_a_row_that_fits_all():
    assert all(rows[-1][0] == "*" for rows in SCHEMES.values())
    assert ("*bias", "zeros") in [(pattern, draw.__name__) for pattern, draw in ALWAYS]


def test_logits_of_a_fresh_language_model_are_near_even():
    """A fresh model's loss is that of guessing: log V."""
    for name in presets(lambda config: config.family == "decoder-only"):
        model = fresh(tiny(name)).eval()
        ids = torch.randint(0, 61, (3, 31), generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert loss.item() == pytest.approx(math.log(61), rel=0.25), name
