"""Every weight starts from the distribution its scheme names, in every preset."""

import math

import pytest
import torch
from support import block_configs, preset_names

import monoblock as mb
from monoblock.config.families import gpt, t5, vaswani
from monoblock.config.knobs import rebuild, vary
from monoblock.config.model import InitConfig
from monoblock.config.presets import tiny
from monoblock.model import Transformer
from monoblock.nn.initialize import COMMON_RULES, SCHEMES, initialize
from monoblock.nn.norm import Norm


def build(config, seed=0):
    torch.manual_seed(seed)
    return Transformer(config)


def std_of(weight):
    return weight.detach().std().item()


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("kind", SCHEMES)
def test_every_scheme_reaches_every_weight_of_every_preset(name, kind):
    def edit(part, values):
        if isinstance(part, InitConfig):
            values["kind"] = kind

    model = build(rebuild(tiny(name), edit))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
        for module in model.modules():
            if isinstance(module, Norm):
                module.reset_parameters()
    initialize(model, model.config)
    initialized = {key: weight for key, weight in model.named_parameters() if not key.endswith(("_gain", ".sinks"))}
    assert all(weight.isfinite().all() for weight in initialized.values())
    assert all(weight.any() for key, weight in initialized.items() if weight.dim() > 1 and not key.endswith("bias"))


@pytest.mark.parametrize("name", preset_names())
def test_biases_start_at_zero_and_norms_as_the_identity(name):
    model = build(tiny(name))
    for key, weight in model.named_parameters():
        if key.endswith("bias"):
            assert not weight.any(), key
    unit_offsets = {block.norm.unit_offset for block in block_configs(model.config)}
    for key, weight in model.named_parameters():
        if key.endswith("norm.weight") and len(unit_offsets) == 1:
            assert (weight == (0.0 if unit_offsets == {True} else 1.0)).all(), key


def test_gpt2_scales_residual_projections_by_the_number_of_additions():
    model = build(gpt(vocab=211, width=128, depth=4, heads=4, context=67))
    assert std_of(model.input.token.weight) == pytest.approx(0.02, rel=0.05)
    block = model.decoder.blocks[2]
    assert std_of(block.attention.query.weight) == pytest.approx(0.02, rel=0.05)
    for layer in (block.attention.output, block.feedforward.down):
        assert std_of(layer.weight) == pytest.approx(0.02 / math.sqrt(2 * 4), rel=0.05)


def test_xavier_is_uniform_by_fan_in_and_fan_out():
    model = build(vaswani(vocab=211, width=128, depth=1, heads=4))
    up = model.decoder.blocks[0].feedforward.up.weight
    bound = math.sqrt(6 / (128 + 512))
    assert up.abs().max() <= bound
    assert std_of(up) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert std_of(model.input.token.weight) == pytest.approx(128**-0.5, rel=0.05)


def test_stacked_experts_are_initialized_one_by_one():
    model = build(vary(vaswani(vocab=211, width=64, depth=1, heads=4), experts=3))
    up = model.decoder.blocks[0].feedforward.up
    assert up.abs().max() <= math.sqrt(6 / (64 + 256))
    assert std_of(up) == pytest.approx(math.sqrt(2 / (64 + 256)), rel=0.05)


def test_t5_puts_the_missing_scale_into_its_queries():
    model = build(t5(vocab=211, width=128, depth=1, heads=4, hidden=256))
    attention = model.decoder.blocks[0].attention
    assert std_of(attention.query.weight) == pytest.approx((128 * 32) ** -0.5, rel=0.05)
    assert std_of(attention.key.weight) == pytest.approx(128**-0.5, rel=0.05)
    assert std_of(model.decoder.blocks[0].feedforward.down.weight) == pytest.approx(256**-0.5, rel=0.05)
    assert std_of(model.input.token.weight) == pytest.approx(1.0, rel=0.05)


def test_the_small_scheme_is_that_of_gpt_neox():
    model = build(vary(gpt(vocab=211, width=128, depth=4, heads=4, context=67), init="small"))
    assert std_of(model.decoder.blocks[0].attention.key.weight) == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.05)
    assert std_of(model.decoder.blocks[0].feedforward.down.weight) == pytest.approx(2 / (4 * math.sqrt(128)), rel=0.05)


def test_the_std_can_be_set():
    model = build(vary(gpt(vocab=211, width=128, depth=1, heads=4, context=67), std=0.1))
    assert std_of(model.input.token.weight) == pytest.approx(0.1, rel=0.05)


def test_every_table_ends_with_a_pattern_that_matches_all():
    assert all(rows[-1][0] == "*" for rows in SCHEMES.values())
    assert ("*bias", "zeros") in [(pattern, draw.__name__) for pattern, draw in COMMON_RULES]


def test_the_loss_of_a_new_language_model_is_that_of_guessing():
    for name in preset_names(lambda config: config.family == "decoder-only"):
        model = build(tiny(name)).eval()
        ids = torch.randint(0, 61, (3, 31), generator=torch.Generator().manual_seed(1))
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert loss.item() == pytest.approx(math.log(61), rel=0.25), name


# -- weights of a user's block ----------------------------------------------------------------------------------------


class UserFeedForward(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = torch.nn.Linear(width, width)
        torch.nn.init.constant_(self.down.weight, 0.25)

    def forward(self, x):
        return self.down(x)


class UserBlock(mb.Block):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.full((config.width,), 0.1))
        self.gate = torch.nn.Linear(config.width, 1)
        torch.nn.init.constant_(self.gate.weight, 0.5)
        torch.nn.init.constant_(self.gate.bias, -2.0)
        self.feedforward = UserFeedForward(config.width)


class UserTransformer(mb.Transformer):
    block_class = UserBlock


@pytest.mark.parametrize("family", [mb.gpt, mb.vaswani, mb.t5])
def test_what_a_users_block_adds_keeps_its_values_and_the_rest_is_initialized(family):
    config = family(vocab=61, width=24, depth=2, heads=3, context=37)
    torch.manual_seed(3)
    model = UserTransformer(config)
    torch.manual_seed(3)
    plain = mb.Transformer(config)
    for name, weight in model.named_parameters():
        expected = {"scale": 0.1, "gate.weight": 0.5, "gate.bias": -2.0, "feedforward.down.weight": 0.25}
        value = next((value for end, value in expected.items() if name.endswith(end)), None)
        if value is not None:
            assert (weight == value).all(), name
        elif name.endswith("attention.query.weight"):
            assert std_of(weight) == pytest.approx(std_of(dict(plain.named_parameters())[name]), rel=0.2)
