"""The chapter's calls give the shapes and numbers that it shows, and compute what PyTorch's own modules compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monoblock.classic.chapter import (
    MultiHeadAttention,
    TransformerBlock,
    scaled_dot_product_attention,
    sinusoidal_positional_encoding,
)
from monoblock.config.model import Rotary
from monoblock.nn.positions import apply_rotary, rotary_angles

CAUSAL = torch.ones(6, 6).tril()


@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL.bool()], ids=["none", "numbers", "booleans"])
def test_attention_on_three_dimensional_input(mask):
    q, k, v = torch.randn(3, 2, 6, 8)
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    assert (output.shape, weights.shape) == ((2, 6, 8), (2, 6, 6))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.bool())
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_a_mask_for_each_row_of_a_batch():
    q, k, v = torch.randn(3, 2, 6, 8)
    mask = torch.stack((CAUSAL, torch.ones(6, 6)))
    output, weights = scaled_dot_product_attention(q, k, v, mask)
    assert (weights[0].triu(1) == 0).all()
    torch.testing.assert_close(output[1], F.scaled_dot_product_attention(q, k, v)[1], atol=1e-5, rtol=0)


def test_the_walk_through_has_the_weights_0230_0129_0410_0230():
    """Queries and keys with the scores 1, 0, 2, 1 in their first row, as in the chapter."""
    Q = torch.tensor([[1.0, 0, 1]])[None]
    K = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1]])[None]
    V = torch.randn(1, 4, 3)
    assert (Q @ K.mT).flatten().tolist() == [1, 0, 2, 1]
    scaled = Q @ K.mT / 3**0.5
    assert [round(float(s), 3) for s in scaled.flatten()] == [0.577, 0, 1.155, 0.577]
    output, weights = scaled_dot_product_attention(Q, K, V)
    assert [round(float(w), 3) for w in weights.flatten()] == [0.230, 0.129, 0.410, 0.230]
    torch.testing.assert_close(output, weights @ V)


def test_multi_head_attention_is_that_of_pytorch_with_its_weights():
    torch.manual_seed(1)
    reference, attention = nn.MultiheadAttention(16, 4, bias=False, batch_first=True), MultiHeadAttention(16, 4)
    names = ("W_Q", "W_K", "W_V")
    state = {f"{name}.weight": w for name, w in zip(names, reference.in_proj_weight.chunk(3), strict=True)}
    attention.load_state_dict({**state, "W_O.weight": reference.out_proj.weight})
    X = torch.randn(2, 6, 16)
    expected = reference(X, X, X, average_attn_weights=False)
    for ours, theirs in zip(attention(X), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("h", [1, 2, 4, 8])
def test_the_number_of_heads_does_not_change_the_number_of_parameters(h):
    assert sum(p.numel() for p in MultiHeadAttention(512, h).parameters()) == 1_048_576


def test_gradients_flow_through_the_weights_and_the_output():
    attention, X = MultiHeadAttention(16, 4), torch.randn(1, 6, 16, requires_grad=True)
    output, weights = attention(X)
    (gradient,) = torch.autograd.grad(weights[..., 0].sum(), X, retain_graph=True)
    assert gradient.abs().max() > 0
    output.sum().backward()
    assert all(p.grad is not None for p in attention.parameters())


def test_sinusoidal_positions():
    table = sinusoidal_positional_encoding(T=128, d_model=64)
    assert table.shape == (128, 64)
    angles = torch.arange(128).double()[:, None] / 10_000 ** (torch.arange(32).double() / 32)
    torch.testing.assert_close(table[:, 0::2].double(), angles.sin(), atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, 1::2].double(), angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(table.norm(dim=-1), torch.full((128,), 32**0.5))  # every position has norm sqrt(32)
    assert table[0].tolist() == [0, 1] * 32


def test_a_step_of_training_lowers_the_loss():
    torch.manual_seed(3)
    block, x, target = TransformerBlock(32, 4, 128), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    optimizer, losses = torch.optim.AdamW(block.parameters(), lr=3e-4), []
    for _ in range(5):
        loss = F.mse_loss(block(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_rotary_scores_of_5_12_and_10_17_are_equal():
    torch.manual_seed(4)
    q, k = torch.randn(2, 1, 2, 1, 8).double()  # two heads of size 8, the same query and key at every position

    def score(m, n):
        angles = [rotary_angles(Rotary(), 8, torch.tensor([[position]]), torch.float64) for position in (m, n)]
        return (apply_rotary(q, angles[0]) * apply_rotary(k, angles[1])).sum(-1)

    torch.testing.assert_close(score(5, 12), score(10, 17), atol=1e-5, rtol=0)
    assert (score(5, 12) - score(5, 13)).abs().max() > 1e-3


def test_standard_deviations_of_dot_products():
    """8 for d_k = 64 and about 22.6 for d_k = 512, three of them 24 and 68; divided by sqrt(d_k), one."""
    torch.manual_seed(5)
    for d_k, deviation, three in ((64, 8.0, 24), (512, 22.6, 68)):
        q, k = torch.randn(2, 5_000, d_k)
        scores = (q * k).sum(-1)
        assert 3 * d_k**0.5 == pytest.approx(three, abs=0.2)
        assert float(scores.std()) == pytest.approx(deviation, rel=0.04)
        assert float((scores / d_k**0.5).std()) == pytest.approx(1, rel=0.04)
