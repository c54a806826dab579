"""THE block against torch's encoder and decoder layers, and every topology against its line of algebra."""

import pytest
import torch
from support import assert_near, randomize_weights
from torch import nn

from monoblock.config.model import AttentionConfig, BlockConfig, ExpertsConfig, FeedForwardConfig, NormConfig
from monoblock.nn.attention import AttentionContext
from monoblock.nn.block import Block
from monoblock.nn.masks import TokenPositions, arange_positions, causal, everything

B, T, S, D, F = 2, 5, 7, 6, 11
CROSS = AttentionContext(everything.resolve(arange_positions(T), arange_positions(S)))
FULL = AttentionContext(everything.resolve(arange_positions(T), arange_positions(T)))
CAUSAL = AttentionContext(causal.resolve(arange_positions(T), arange_positions(T)))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, MEMORY = draw(B, T, D), draw(B, S, D, seed=1)


def build(*, cross=False, mask="full", **options):
    config = BlockConfig(
        width=D,
        attention=AttentionConfig(heads=3, mask=mask),
        cross=AttentionConfig(heads=3, mask="full") if cross else None,
        feedforward=FeedForwardConfig(hidden=F, activation="relu"),
        **options,
    )
    return randomize_weights(Block(config).double()).eval()


def torch_layer(kind, ours):
    """torch's layer with the same weights."""
    first = ours.config.norm_place == "pre"
    theirs = kind(D, 3, F, dropout=0.0, norm_first=first, batch_first=True, dtype=torch.float64)
    cross = ours.cross is not None
    attentions = [("self_attn", ours.attention)] + ([("multihead_attn", ours.cross)] if cross else [])
    weights = {}
    for name, attention in attentions:
        layers = (attention.query, attention.key, attention.value)
        weights[f"{name}.in_proj_weight"] = torch.cat([layer.weight for layer in layers])
        weights[f"{name}.in_proj_bias"] = torch.cat([layer.bias for layer in layers])
        weights |= {f"{name}.out_proj.{k}": v for k, v in attention.output.state_dict().items()}
    norms = [ours.attention_norm, *([ours.cross_norm] if cross else []), ours.feedforward_norm]
    for number, norm in enumerate(norms, 1):
        weights |= {f"norm{number}.{k}": v for k, v in norm.state_dict().items()}
    for name, linear in (("linear1", ours.feedforward.up), ("linear2", ours.feedforward.down)):
        weights |= {f"{name}.{k}": v for k, v in linear.state_dict().items()}
    theirs.load_state_dict(weights)
    return theirs.eval()


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_an_encoder_block_is_torchs(norm_place):
    ours = build(norm_place=norm_place)
    assert_near(ours(X, FULL), torch_layer(nn.TransformerEncoderLayer, ours)(X))


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_a_padded_encoder_block_is_torchs(norm_place):
    ours, padding = build(norm_place=norm_place), torch.arange(T) >= torch.tensor([[3], [T]])
    positions = TokenPositions(torch.arange(T)[None], valid=~padding)
    actual = ours(X, AttentionContext(everything.resolve(positions, positions)))
    with torch.enable_grad():  # torch's fast path, taken without gradients, fills padding with zeros
        expected = torch_layer(nn.TransformerEncoderLayer, ours).train()(X, src_key_padding_mask=padding)
    assert_near(actual, expected)


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_a_decoder_block_is_torchs(norm_place):
    ours = build(norm_place=norm_place, cross=True, mask="causal")
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = torch_layer(nn.TransformerDecoderLayer, ours)(X, MEMORY, tgt_mask=mask)
    assert_near(ours(X, CAUSAL, memory=MEMORY, memory_context=CROSS), expected)


TOPOLOGIES = {
    "pre": lambda x, f, norm, after: x + f(norm(x)),
    "post": lambda x, f, norm, after: norm(x + f(x)),
    "output": lambda x, f, norm, after: x + norm(f(x)),
    "sandwich": lambda x, f, norm, after: x + after(f(norm(x))),
}


@pytest.mark.parametrize("norm_place", TOPOLOGIES)
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("norm", [NormConfig(), NormConfig(kind="rms", affine="scale")], ids=["layer", "rms"])
def test_every_placement_of_the_norm_is_its_line_of_algebra(norm_place, cross, norm):
    block = build(norm_place=norm_place, cross=cross, norm=norm)
    sublayers = {"attention": lambda h: block.attention(h, FULL)}
    if cross:
        sublayers["cross"] = lambda h: block.cross(h, CROSS, memory=MEMORY)
    sublayers["feedforward"] = block.feedforward
    x = X
    for name, f in sublayers.items():
        x = TOPOLOGIES[norm_place](x, f, getattr(block, f"{name}_norm"), getattr(block, f"{name}_output_norm"))
    assert_near(block(X, FULL, memory=MEMORY if cross else None, memory_context=CROSS if cross else None), x)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_parallel_sublayers_read_the_same_input(shared, normed):
    if shared and not normed:
        return
    block = build(residual="parallel_shared" if shared else "parallel", attention_norm=normed)
    first = block.attention_norm(X) if normed else X
    second = first if shared else block.feedforward_norm(X)
    assert_near(block(X, FULL), X + block.attention(first, FULL) + block.feedforward(second))


def test_gains_and_scales_weigh_what_is_added():
    block = build(layer_scale=0.1, residual_scale=0.5)
    x = X + 0.5 * block.attention_gain * block.attention(block.attention_norm(X), FULL)
    x = x + 0.5 * block.feedforward_gain * block.feedforward(block.feedforward_norm(x))
    assert_near(block(X, FULL), x)


def test_a_gain_starts_where_the_configuration_says():
    fresh = Block(build(layer_scale=0.1, cross=True).config)
    for gain in (fresh.attention_gain, fresh.cross_gain, fresh.feedforward_gain):
        assert_near(gain, torch.full((D,), 0.1))


def test_without_its_attention_norm_a_block_reads_its_input_as_it_is():
    block = build(attention_norm=False)
    assert block.attention_norm is None
    x = X + block.attention(X, FULL)
    assert_near(block(X, FULL), x + block.feedforward(block.feedforward_norm(x)))


def test_experts_take_the_place_of_the_feed_forward():
    config = build().config
    experts = FeedForwardConfig(hidden=F, experts=ExpertsConfig(count=3))
    block = randomize_weights(Block(BlockConfig(width=D, attention=config.attention, feedforward=experts)).double())
    x = X + block.attention(block.attention_norm(X), FULL)
    assert_near(block(X, FULL), x + block.feedforward(block.feedforward_norm(x)))


def test_dropout_acts_in_training_only():
    block = build(dropout=0.5)
    assert torch.equal(block(X, FULL), block(X, FULL))
    block.train()
    assert not torch.equal(block(X, FULL), block(X, FULL))
