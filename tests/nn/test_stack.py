"""A stack runs its blocks in the order of the pattern; tied repeats share weights."""

from dataclasses import replace

import pytest
import torch
from support import assert_near, randomize_weights

from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    FeedForwardConfig,
    NormConfig,
    Repeat,
    Rotary,
    StackConfig,
)
from monoblock.errors import ConfigError
from monoblock.nn.attention import AttentionContext
from monoblock.nn.masks import arange_positions, causal, everything, window
from monoblock.nn.positions import alibi_bias, bucket_bias, rotary_angles
from monoblock.nn.stack import Stack

B, T, D = 2, 7, 12
WINDOWED = AttentionConfig(heads=3, window=3)
BLOCK = BlockConfig(width=D, attention=AttentionConfig(heads=3), feedforward=FeedForwardConfig(hidden=5))
LOCAL = replace(BLOCK, attention=WINDOWED)
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(*repeats, norm=None):
    return randomize_weights(Stack(StackConfig(pattern=repeats, norm=norm)).double()).eval()


def with_positions(positions, mask="causal"):
    return replace(BLOCK, attention=replace(BLOCK.attention, positions=positions, mask=mask))


def test_blocks_run_in_the_order_of_the_pattern():
    stack = build(Repeat(blocks=(LOCAL, BLOCK), times=2), Repeat(blocks=(LOCAL,)), norm=NormConfig())
    x = X
    for number, mask in enumerate([causal & window(3), causal, causal & window(3), causal, causal & window(3)]):
        x = getattr(stack, str(number))(x, AttentionContext(mask.resolve(arange_positions(T), arange_positions(T))))
    assert_near(stack(X, arange_positions(T)), stack.norm(x))


def test_a_tied_repeat_shares_its_weights():
    stack = build(Repeat(blocks=(BLOCK, LOCAL), times=3, tied=True), Repeat(blocks=(BLOCK,)))
    assert stack.block_order == [0, 1, 0, 1, 0, 1, 6]
    assert {name.split(".")[0] for name in stack.state_dict()} == {"0", "1", "6"}
    untied = build(Repeat(blocks=(BLOCK, LOCAL), times=3), Repeat(blocks=(BLOCK,)))
    weights = {
        name: stack.state_dict()[f"{stack.block_order[int(name.split('.')[0])]}.{name.partition('.')[2]}"]
        for name in untied.state_dict()
    }
    untied.load_state_dict(weights)
    assert_near(stack(X, arange_positions(T)), untied(X, arange_positions(T)))


def test_rotary_angles_are_those_of_each_kind_of_block():
    first, second = with_positions(Rotary()), with_positions(Rotary(base=50.0, dim=2, layout="interleaved"))
    stack, x = build(Repeat(blocks=(first, second))), X
    for number, block in enumerate((first, second)):
        angles = rotary_angles(block.attention.positions, 4, torch.arange(T)[None], torch.float64)
        x = getattr(stack, str(number))(
            x, AttentionContext(causal.resolve(arange_positions(T), arange_positions(T)), rotary_angles=angles)
        )
    assert_near(stack(X, arange_positions(T)), x)


def test_alibi_is_added_to_the_scores():
    stack = build(Repeat(blocks=(with_positions(Alibi()),)))
    positions = torch.arange(T)[None]
    context = AttentionContext(
        causal.resolve(arange_positions(T), arange_positions(T)), bias=alibi_bias(Alibi(), 3, 4, positions, positions)
    )
    assert_near(stack(X, arange_positions(T)), getattr(stack, "0")(X, context))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_shared_table_of_buckets_belongs_to_the_stack(mask):
    stack = build(Repeat(blocks=(with_positions(Buckets(count=8, max_distance=9), mask),), times=2))
    assert [name for name in stack.state_dict() if "position_bias" in name] == ["position_bias.weight"]
    positions, x = torch.arange(T)[None], X
    mask_rule = causal if mask == "causal" else everything
    bias = bucket_bias(
        Buckets(count=8, max_distance=9), stack.position_bias, positions, positions, bidirectional=mask == "full"
    )
    for block in stack.blocks:
        x = block(x, AttentionContext(mask_rule.resolve(arange_positions(T), arange_positions(T)), bias=bias))
    assert_near(stack(X, arange_positions(T)), x)


def test_tables_of_buckets_that_are_not_shared_belong_to_each_block():
    stack = build(Repeat(blocks=(with_positions(Buckets(count=8, max_distance=9, shared=False)),), times=2))
    names = [name for name in stack.state_dict() if "position_bias" in name]
    assert names == ["0.attention.position_bias.weight", "1.attention.position_bias.weight"]
    assert stack.position_bias is None
    assert stack(X, arange_positions(T)).shape == (B, T, D)


def test_shared_tables_of_two_shapes_are_refused():
    """One table cannot have two numbers of buckets, or of heads."""
    for other in (Buckets(count=8, max_distance=9), Buckets(count=16, max_distance=30)):
        second = with_positions(other)
        if other.count == 8:
            second = replace(second, attention=replace(second.attention, heads=6))
        blocks = (with_positions(Buckets(count=8, max_distance=9)), second)
        with pytest.raises(ConfigError, match="shared"):
            Stack(StackConfig(pattern=(Repeat(blocks=blocks),)))


def test_widths_that_differ_are_refused():
    wider = replace(BLOCK, width=15)
    with pytest.raises(ConfigError, match="same width"):
        StackConfig(pattern=(Repeat(blocks=(BLOCK, wider)),))
    with pytest.raises(ConfigError, match="at least one block"):
        StackConfig(pattern=())
    with pytest.raises(ConfigError, match="at least one block"):
        Repeat(blocks=())
