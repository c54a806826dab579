"""The table of presets: sound rows, and toys that keep the structure of what they stand for."""

import pytest
from support import blocks, is_text, presets

from monoblock.config import Rotary
from monoblock.errors import ConfigError
from monoblock.presets import PRESETS, find, preset, tiny


@pytest.mark.parametrize("name", presets())
def test_a_row_names_its_source_and_is_found_by_name(name):
    row = PRESETS[name]
    assert row.source
    assert row.parameters > 0
    assert name == name.lower()
    assert find(name) is row
    assert preset(name) is row.config


def test_no_two_rows_are_the_same_model():
    assert len({row.config for row in PRESETS.values()}) == len(PRESETS)


def test_every_structure_the_table_promises_is_in_it():
    """Each family, norm, placement, residual and kind of position occurs in some preset."""
    parts = [block for row in PRESETS.values() for block in blocks(row.config)]
    assert {block.norm.kind for block in parts} == {"layer", "rms"}
    assert {block.norm_place for block in parts} == {"pre", "post", "output", "sandwich"}
    assert {block.residual for block in parts} == {"sequential", "parallel", "parallel_shared"}
    kinds = {block.attention.positions.kind for block in parts if block.attention.positions}
    assert kinds == {"rotary", "alibi", "buckets"}
    added = {row.config.input.positions.kind for row in PRESETS.values() if row.config.input.positions}
    assert added == {"learned", "sinusoid"}


@pytest.mark.parametrize("wrong", ["gpt-2", "lama-7b", "Bert-Base"])
def test_a_name_that_is_not_there_is_answered_with_the_nearest(wrong):
    with pytest.raises(ConfigError, match="did you mean"):
        preset(wrong)
    with pytest.raises(ConfigError, match="there is no preset"):
        tiny(wrong)


@pytest.mark.parametrize("name", presets())
def test_a_toy_keeps_the_structure(name):
    small, large = tiny(name), preset(name)
    assert small.family == large.family
    assert small.tie == large.tie
    assert (small.head and small.head.kind) == (large.head and large.head.kind)
    assert set(map(shape, blocks(small))) == set(map(shape, blocks(large)))


def shape(block):
    """All choices of a block but its sizes."""
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
        attention.groups == attention.heads,
        attention.groups == 1,
        attention.head_dim is not None,
        positions and positions.kind,
        isinstance(positions, Rotary) and (positions.layout, positions.base, positions.dim is not None),
    )


@pytest.mark.parametrize("name", presets(is_text))
def test_a_toy_has_sizes_that_cannot_be_mistaken_for_each_other(name):
    config = tiny(name)
    block = blocks(config)[0]
    sizes = [config.input.vocab, config.width, block.feedforward.hidden, block.attention.heads]
    sizes += [config.input.context] if config.input.context else []
    sizes += [block.attention.key_size(config.width)]
    assert len(set(sizes)) == len(sizes)
    assert all(b.attention.window is None or b.attention.window < 13 for b in blocks(config))
