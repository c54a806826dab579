"""The table of presets, and tiny models that keep their structure."""

import pytest
from support import block_configs, is_text, preset_names

from monoblock.config.knobs import rebuild, vary
from monoblock.config.model import Rotary
from monoblock.config.presets import PRESETS, _shrink, find_preset, preset, tiny
from monoblock.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_a_source_and_is_found_by_name(name):
    entry = PRESETS[name]
    assert entry.source
    assert entry.parameters > 0
    assert name == name.lower()
    assert find_preset(name) is entry
    assert preset(name) is entry.config


def test_no_two_presets_are_the_same_model():
    assert len({row.config for row in PRESETS.values()}) == len(PRESETS)


def test_every_structure_occurs_in_some_preset():
    """Each family, norm, placement, residual and kind of position occurs in some preset."""
    blocks = [block for row in PRESETS.values() for block in block_configs(row.config)]
    assert {block.norm.kind for block in blocks} == {"layer", "rms"}
    assert {block.norm_place for block in blocks} == {"pre", "post", "output", "sandwich"}
    assert {block.residual for block in blocks} == {"sequential", "parallel", "parallel_shared"}
    kinds = {block.attention.positions.kind for block in blocks if block.attention.positions}
    assert kinds == {"rotary", "alibi", "buckets"}
    added = {row.config.input.positions.kind for row in PRESETS.values() if row.config.input.positions}
    assert added == {"learned", "sinusoid"}


@pytest.mark.parametrize("wrong", ["gpt-2", "lama-7b", "Bert-Base"])
def test_an_unknown_name_is_an_error_with_a_suggestion(wrong):
    with pytest.raises(ConfigError, match="did you mean"):
        preset(wrong)
    with pytest.raises(ConfigError, match="there is no preset"):
        tiny(wrong)


@pytest.mark.parametrize("name", preset_names())
def test_a_tiny_model_keeps_the_structure(name):
    small, large = tiny(name), preset(name)
    assert small.family == large.family
    assert small.tie == large.tie
    assert (small.head and small.head.kind) == (large.head and large.head.kind)
    assert set(map(structure, block_configs(small))) == set(map(structure, block_configs(large)))


def structure(block):
    """All choices of a block except its sizes."""
    attention, experts = block.attention, block.feedforward.experts
    positions = attention.positions
    return (
        block.norm,
        block.norm_place,
        block.residual,
        block.attention_norm,
        block.cross is not None,
        block.feedforward.activation,
        block.feedforward.gated,
        block.feedforward.bias,
        experts and (experts.router, experts.top_k),
        attention.bias,
        attention.mask,
        attention.window is not None,
        attention.softcap,
        attention.qk_norm,
        attention.num_kv_heads == attention.heads,
        attention.num_kv_heads == 1,
        attention.head_dim is not None,
        positions and positions.kind,
        isinstance(positions, Rotary) and (positions.layout, positions.base, positions.dim is not None),
    )


def test_a_tiny_mixture_has_room_for_many_experts_of_a_token():
    large = vary(preset("mixtral-8x7b"), experts=64, top_k=8)
    assert {*map(structure, block_configs(rebuild(large, _shrink)))} == {*map(structure, block_configs(large))}


@pytest.mark.parametrize("name", preset_names(is_text))
def test_the_sizes_of_a_tiny_model_differ(name):
    config = tiny(name)
    block = block_configs(config)[0]
    sizes = [config.input.vocab, config.width, block.feedforward.hidden, block.attention.heads]
    sizes += [config.input.context] if config.input.context else []
    sizes += [block.attention.key_size(config.width)]
    assert len(set(sizes)) == len(sizes)
    assert all(b.attention.window is None or b.attention.window < 13 for b in block_configs(config))
