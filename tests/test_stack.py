"""A stack is its blocks one after the other; a pattern says which, and tied runs use their weights again."""

from dataclasses import replace

import pytest
import torch
from support import close, stir

from monoblock.attention import View
from monoblock.config import (
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
from monoblock.masks import causal, everything, run, window
from monoblock.positions import alibi, bucket_bias, turn
from monoblock.stack import Stack

B, T, D = 2, 7, 12
NEAR = AttentionConfig(heads=3, window=3)
BLOCK = BlockConfig(width=D, attention=AttentionConfig(heads=3), feedforward=FeedForwardConfig(hidden=5))
LOCAL = replace(BLOCK, attention=NEAR)
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(*runs, norm=None):
    return stir(Stack(StackConfig(pattern=runs, norm=norm)).double()).eval()


def with_positions(positions, mask="causal"):
    return replace(BLOCK, attention=replace(BLOCK.attention, positions=positions, mask=mask))


def test_blocks_run_in_the_order_of_the_pattern():
    stack = build(Repeat(blocks=(LOCAL, BLOCK), times=2), Repeat(blocks=(LOCAL,)), norm=NormConfig())
    x = X
    for number, mask in enumerate([causal & window(3), causal, causal & window(3), causal, causal & window(3)]):
        x = getattr(stack, str(number))(x, View(mask.between(run(T), run(T))))
    close(stack(X, run(T)), stack.norm(x))


def test_a_tied_run_uses_its_weights_again():
    stack = build(Repeat(blocks=(BLOCK, LOCAL), times=3, tied=True), Repeat(blocks=(BLOCK,)))
    assert stack.order == [0, 1, 0, 1, 0, 1, 6]
    assert {name.split(".")[0] for name in stack.state_dict()} == {"0", "1", "6"}
    loose = build(Repeat(blocks=(BLOCK, LOCAL), times=3), Repeat(blocks=(BLOCK,)))
    weights = {
        name: stack.state_dict()[f"{stack.order[int(name.split('.')[0])]}.{name.partition('.')[2]}"]
        for name in loose.state_dict()
    }
    loose.load_state_dict(weights)
    close(stack(X, run(T)), loose(X, run(T)))


def test_rotary_angles_are_those_of_each_kind_of_block():
    one, two = with_positions(Rotary()), with_positions(Rotary(base=50.0, dim=2, layout="interleaved"))
    stack, x = build(Repeat(blocks=(one, two))), X
    for number, block in enumerate((one, two)):
        by = turn(block.attention.positions, 4, torch.arange(T)[None], torch.float64)
        x = getattr(stack, str(number))(x, View(causal.between(run(T), run(T)), turn=by))
    close(stack(X, run(T)), x)


def test_alibi_is_added_to_the_scores():
    stack = build(Repeat(blocks=(with_positions(Alibi()),)))
    at = torch.arange(T)[None]
    view = View(causal.between(run(T), run(T)), bias=alibi(Alibi(), 3, 4, at, at))
    close(stack(X, run(T)), getattr(stack, "0")(X, view))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_one_table_of_buckets_serves_the_whole_stack(mask):
    stack = build(Repeat(blocks=(with_positions(Buckets(count=8, max_distance=9), mask),), times=2))
    assert [name for name in stack.state_dict() if "position_bias" in name] == ["position_bias.weight"]
    at, x = torch.arange(T)[None], X
    rule = causal if mask == "causal" else everything
    bias = bucket_bias(Buckets(count=8, max_distance=9), stack.position_bias.weight, at, at, both_sides=mask == "full")
    for block in stack.blocks:
        x = block(x, View(rule.between(run(T), run(T)), bias=bias))
    close(stack(X, run(T)), x)


def test_tables_of_buckets_that_are_not_shared_belong_to_each_block():
    stack = build(Repeat(blocks=(with_positions(Buckets(count=8, max_distance=9, shared=False)),), times=2))
    names = [name for name in stack.state_dict() if "position_bias" in name]
    assert names == ["0.attention.position_bias.weight", "1.attention.position_bias.weight"]
    assert stack.position_bias is None
    assert stack(X, run(T)).shape == (B, T, D)


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
    with pytest.raises(ConfigError, match="one width"):
        StackConfig(pattern=(Repeat(blocks=(BLOCK, wider)),))
    with pytest.raises(ConfigError, match="at least one block"):
        StackConfig(pattern=())
    with pytest.raises(ConfigError, match="at least one block"):
        Repeat(blocks=())
