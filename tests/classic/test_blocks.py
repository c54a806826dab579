"""The tutorial's calls give the shapes that it prints, and compute what PyTorch's own modules compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monoblock.classic.blocks import (
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    PositionalEncoding,
    Transformer,
    WarmupScheduler,
    make_masks,
    scaled_dot_product_attention,
    train_step,
)
from monoblock.errors import ConfigError

SIZES = {"d_model": 12, "num_heads": 3, "num_blocks": 2, "d_ff": 20, "max_len": 32}


def copy_attention(ours, theirs):
    """Copy the weights of an nn.MultiheadAttention without biases."""
    names = ("W_q", "W_k", "W_v")
    state = {f"{name}.weight": weight for name, weight in zip(names, theirs.in_proj_weight.chunk(3), strict=True)}
    ours.load_state_dict({**state, "W_o.weight": theirs.out_proj.weight})


def listing_weights(layer, *, cross=False):
    """Return the weights of PyTorch's encoder or decoder layer under the tutorial's names; its biases are dropped."""
    attentions = {"self_attn": layer.self_attn} | ({"cross_attn": layer.multihead_attn} if cross else {})
    state = {}
    for name, attention in attentions.items():
        query, key, value = attention.in_proj_weight.chunk(3)
        weights = {"W_q": query, "W_k": key, "W_v": value, "W_o": attention.out_proj.weight}
        state |= {f"{name}.{theirs}.weight": weight for theirs, weight in weights.items()}
    modules = {"ffn.0": layer.linear1, "ffn.3": layer.linear2}
    modules |= {f"norm{n}": getattr(layer, f"norm{n}") for n in range(1, len(attentions) + 2)}
    return state | {f"{name}.{kind}": w for name, module in modules.items() for kind, w in module.state_dict().items()}


def without_attention_biases(module):
    for attention in module.modules():
        if isinstance(attention, nn.MultiheadAttention):
            nn.init.zeros_(attention.in_proj_bias)
            nn.init.zeros_(attention.out_proj.bias)
    return module.eval()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_positions_are_added_and_the_table_has_the_shape_of_the_listing():
    encoding = PositionalEncoding(d_model=8)
    assert encoding.pe.shape == (1, 5000, 8)
    assert encoding.dropout.p == 0.1
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(encoding.eval()(x), x + encoding.pe[:, :7])
    torch.testing.assert_close(encoding.pe[0, :, 0], torch.arange(5000.0).sin(), atol=1e-4, rtol=0)
    torch.testing.assert_close(encoding.pe[0, :, 1], torch.arange(5000.0).cos(), atol=1e-4, rtol=0)


def test_the_numerical_demo():
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    out, weights = scaled_dot_product_attention(q, k, v)
    assert (out.shape, weights.shape) == ((1, 1, 4, 8), (1, 1, 4, 4))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 4))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "mask", [torch.ones(5, 5).tril(), torch.tensor([1, 1, 1, 0, 0]).view(1, 1, 1, 5)], ids=["causal", "padding"]
)
def test_masked_keys_get_no_weight(mask):
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    assert (weights.masked_select((mask == 0).expand_as(weights)) == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask != 0), atol=1e-5, rtol=0)


def test_a_query_that_sees_no_key_gives_zeros():
    """The listing gives NaN."""
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    out, weights = scaled_dot_product_attention(q, k, v, torch.ones(4, 4).tril(-1))
    assert (out[0, 0, 0] == 0).all()
    assert (weights[0, 0, 0] == 0).all()


def test_multi_head_attention_is_that_of_pytorch():
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(512, 8, bias=False, batch_first=True)
    attention, x = MultiHeadAttention(d_model=512, num_heads=8), torch.randn(2, 10, 512)
    copy_attention(attention, reference)
    assert sum(p.numel() for p in attention.parameters()) == 4 * 512**2
    torch.testing.assert_close(attention(x, x, x), reference(x, x, x)[0], atol=1e-5, rtol=0)


def test_queries_keys_and_values_may_differ():
    torch.manual_seed(1)
    reference, attention = nn.MultiheadAttention(12, 3, bias=False, batch_first=True), MultiHeadAttention(12, 3)
    copy_attention(attention, reference)
    q, (k, v) = torch.randn(2, 4, 12), torch.randn(2, 2, 7, 12)
    padding = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    expected = reference(q, k, v, key_padding_mask=padding == 0)[0]
    torch.testing.assert_close(attention(q, k, v, padding[:, None, None]), expected, atol=1e-5, rtol=0)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ConfigError, match="does not divide"):
        MultiHeadAttention(d_model=10, num_heads=3)


def test_the_encoder_block_is_the_encoder_layer_of_pytorch():
    torch.manual_seed(2)
    layer = without_attention_biases(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True))
    block, x, mask = EncoderBlock(12, 3, 20, dropout=0.1).eval(), torch.randn(2, 5, 12), torch.ones(5, 5).tril()
    block.load_state_dict(listing_weights(layer))
    torch.testing.assert_close(block(x), layer(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(block(x, mask), layer(x, src_mask=mask == 0), atol=1e-5, rtol=0)


def test_the_decoder_block_is_the_decoder_layer_of_pytorch():
    torch.manual_seed(3)
    layer = without_attention_biases(nn.TransformerDecoderLayer(12, 3, 20, batch_first=True))
    block = DecoderBlock(12, 3, 20).eval()
    block.load_state_dict(listing_weights(layer, cross=True))
    x, memory, mask = torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.ones(5, 5).tril()
    padding = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    expected = layer(x, memory, tgt_mask=mask == 0, memory_key_padding_mask=padding == 0)
    torch.testing.assert_close(block(x, memory, mask, padding[:, None, None]), expected, atol=1e-5, rtol=0)


def test_six_encoder_blocks_keep_the_shape():
    encoder = Encoder(num_blocks=6, d_model=32, num_heads=8, d_ff=64)
    assert encoder(torch.randn(2, 10, 32)).shape == (2, 10, 32)
    assert len(encoder.blocks) == 6


# -- the whole model --------------------------------------------------------------------------------------------------


def test_the_base_model_has_100_970_632_parameters_and_63_045_632_if_tied_without_bias():
    """The tutorial prints 65,052,672."""
    with torch.device("meta"):
        model = Transformer(src_vocab=37_000, tgt_vocab=37_000)
    assert sum(p.numel() for p in model.parameters()) == 100_970_632
    model.tgt_embed.weight = model.out_proj.weight = model.src_embed.weight
    model.out_proj.bias = None
    assert sum(p.numel() for p in model.parameters()) == 63_045_632


def test_the_model_is_nn_transformer():
    torch.manual_seed(5)
    theirs = nn.Transformer(12, 4, 2, 2, 20, batch_first=True)
    theirs.encoder.norm = theirs.decoder.norm = None  # PyTorch adds a norm after each stack, the paper does not
    without_attention_biases(theirs)
    model = Transformer(23, 19, **(SIZES | {"num_heads": 4})).eval()
    for block, layer in zip(model.encoder.blocks, theirs.encoder.layers, strict=True):
        block.load_state_dict(listing_weights(layer))
    for block, layer in zip(model.decoder, theirs.decoder.layers, strict=True):
        block.load_state_dict(listing_weights(layer, cross=True))
    source, target = torch.randint(23, (2, 7)), torch.randint(19, (2, 5))
    causal = torch.ones(5, 5).tril()
    embedded = (
        model.pos_enc(embed(ids) * 12**0.5) for embed, ids in ((model.src_embed, source), (model.tgt_embed, target))
    )
    expected = model.out_proj(theirs(*embedded, tgt_mask=causal == 0))
    torch.testing.assert_close(model(source, target, tgt_mask=causal), expected, atol=1e-5, rtol=0)


def test_dropout_reaches_every_part():
    """In the listing the encoder keeps 0.1."""
    model = Transformer(23, 19, **SIZES, dropout=0.3)
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.3}


def test_no_mask_lets_the_decoder_see_the_future_and_the_masks_of_a_batch_do_not():
    torch.manual_seed(6)
    model = Transformer(23, 19, **SIZES).eval()
    source, target = torch.tensor([[3, 5, 7]]), torch.tensor([[2, 4, 6, 8]])
    other = torch.tensor([[2, 4, 6, 9]])
    assert (model(source, target)[:, 0] - model(source, other)[:, 0]).abs().max() > 1e-4
    masked, changed = (model(source, ids, *make_masks(source, ids)) for ids in (target, other))
    assert torch.equal(masked[:, :3], changed[:, :3])


def test_the_mask_of_a_decoder_covers_the_padding_too():
    source, target = torch.tensor([[3, 5, 0]]), torch.tensor([[2, 4, 0, 0]])
    source_mask, target_mask = make_masks(source, target)
    assert source_mask.tolist() == [[[[True, True, False]]]]
    assert target_mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_each_update():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = WarmupScheduler(optimizer, d_model=512, warmup_steps=40), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([512**-0.5 * min(step**-0.5, step * 40**-1.5) for step in range(1, 101)])
    assert max(rates) == rates[39]


def test_the_peak_of_the_paper_is_at_4000_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = WarmupScheduler(optimizer, d_model=512, warmup_steps=4000)
    scheduler.last_epoch = 3999
    assert scheduler.get_lr() == [pytest.approx(6.99e-4, abs=1e-6)]


def test_steps_of_training_lower_the_loss():
    torch.manual_seed(8)
    model = Transformer(23, 19, **SIZES, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = WarmupScheduler(optimizer, d_model=12, warmup_steps=20)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)
    source, target = torch.randint(1, 23, (4, 6)), torch.randint(1, 19, (4, 7))
    losses = [train_step(source, target, model, optimizer, scheduler, criterion) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
