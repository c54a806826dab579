"""Attention against a loop and against torch; multi-head attention against torch.nn.MultiheadAttention."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import ActivationTap, assert_near, randomize_weights
from torch import nn
from torch.autograd import gradcheck

from monoblock.config.model import AttentionConfig, NormConfig, Rotary
from monoblock.nn.attention import Attention, AttentionContext, ScoreOptions, attend, attend_fused
from monoblock.nn.masks import TokenPositions, arange_positions, causal, everything
from monoblock.nn.norm import layer_norm, rms_norm
from monoblock.nn.positions import apply_rotary, rotary_angles

B, H, T, S, K, V = 2, 6, 5, 7, 4, 3
HALF = [torch.float16, torch.bfloat16]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(kv_heads=H, dtype=torch.float64):
    return (
        randn(B, H, T, K, dtype=dtype),
        randn(B, kv_heads, S, K, seed=1, dtype=dtype),
        randn(B, kv_heads, S, V, seed=2, dtype=dtype),
    )


def random_mask():
    mask = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1, 0, 2] = False  # a query that sees nothing
    return mask


def attend_by_loop(q, k, v, mask=None, bias=None, *, scale=None, softcap=None, sinks=None):
    """Equation 1 for one query of one head at a time."""
    out = torch.zeros(B, H, T, V, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h * k.shape[1] // H
            for t in range(T):
                seen = [s for s in range(S) if mask is None or mask[b, 0, t, s]]
                scores = [(q[b, h, t] @ k[b, g, s]).item() * (scale or K**-0.5) for s in seen]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                if bias is not None:
                    scores = [score + bias[b, h, t, s].item() for score, s in zip(scores, seen, strict=True)]
                total = sum(math.exp(score) for score in scores)
                total += math.exp(sinks[h]) if sinks is not None else 0
                for score, s in zip(scores, seen, strict=True):
                    out[b, h, t] += math.exp(score) / total * v[b, g, s]
    return out


OPTIONS = {
    "plain": {},
    "mask": {"mask": random_mask()},
    "bias": {"bias": randn(B, H, T, S, seed=4)},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": randn(H, seed=5)},
    "all": {
        "mask": random_mask(),
        "bias": randn(B, H, T, S, seed=4),
        "scale": 0.7,
        "softcap": 1.5,
        "sinks": randn(H, seed=5),
    },
}


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_attend_is_equation_one(kv_heads, name):
    q, k, v = qkv(kv_heads)
    assert_near(attend(q, k, v, **OPTIONS[name]), attend_by_loop(q, k, v, **OPTIONS[name]))


def test_attend_is_torchs_attention():
    q, k, v = qkv()
    mask = random_mask()
    mask[1, 0, 2, 0] = True
    assert_near(attend(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    bias = randn(B, H, T, S, seed=4)
    assert_near(
        attend(q, k, v, bias=bias, scale=0.3), F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)
    )


def key_positions(valid=None):
    return TokenPositions(torch.arange(S).expand(B, S), valid=valid)


CONTEXTS = {
    "all": (lambda: AttentionContext(everything.resolve(arange_positions(T), arange_positions(S))), S),
    "causal": (lambda: AttentionContext(causal.resolve(arange_positions(T), arange_positions(T))), T),
    "padding": (
        lambda: AttentionContext(
            everything.resolve(arange_positions(T), key_positions(torch.arange(S) < torch.tensor([[5], [0]])))
        ),
        S,
    ),
}


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("biased", [False, True])
def test_fused_attention_is_plain_attention(kv_heads, name, biased):
    build_context, keys = CONTEXTS[name]
    context, (q, k, v) = build_context(), qkv(kv_heads)
    k, v, bias = k[:, :, :keys], v[:, :, :keys], randn(B, H, T, keys, seed=4) if biased else None
    plain = attend(q, k, v, context.dense_mask(), bias, scale=0.7)
    assert_near(attend_fused(q, k, v, context, ScoreOptions(bias, scale=0.7)), plain)
    if name == "padding":
        assert not plain[1].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_finite_differences(name):
    inputs = tuple(t.requires_grad_() for t in qkv(3))
    options = OPTIONS[name]
    extra = [key for key in ("bias", "sinks") if key in options]

    def run(q, k, v, *tensors):
        return attend(q, k, v, **{**options, **dict(zip(extra, tensors, strict=True))})

    assert gradcheck(run, (*inputs, *(options[key].clone().requires_grad_() for key in extra)))


@pytest.mark.parametrize("sinks", [None, torch.zeros(H)], ids=["", "sinks"])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(sinks):
    q, k, v = (t.requires_grad_() for t in qkv())
    out = attend(q, k, v, random_mask(), sinks=sinks)
    assert not out[1, :, 2].any()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_a_nan_among_visible_keys_propagates():
    q, k, v = qkv()
    v[0, 0, 0, 0] = math.nan
    assert attend(q, k, v)[0, 0].isnan().any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", CONTEXTS)
def test_large_sixteen_bit_inputs_give_no_nan(dtype, kv_heads, name):
    """Queries and keys of 6e4 have scores of 1e10, which overflow fp16 although their softmax does not."""
    build_context, keys = CONTEXTS[name]
    context = build_context()
    q, k, v = (t.mul(6e4 / t.abs().max()).to(dtype) for t in qkv(kv_heads))
    k, v = k[:, :, :keys], v[:, :, :keys]
    plain = attend(q, k, v, context.dense_mask())
    fused = attend_fused(q, k, v, context)
    for out in (plain, fused):
        assert out.dtype == dtype
        assert out.isfinite().all()
    torch.testing.assert_close(
        plain.double(), attend(q.double(), k.double(), v.double(), context.dense_mask()), atol=0, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_one_query_and_one_key_give_the_value(dtype):
    q, k, v = randn(B, H, 1, K, dtype=dtype), randn(B, H, 1, K, dtype=dtype), randn(B, H, 1, V, dtype=dtype)
    assert torch.equal(attend(q, k, v), v)
    context = AttentionContext(causal.resolve(arange_positions(1), arange_positions(1)))
    assert torch.equal(attend_fused(q, k, v, context), v)


# -- the heads ------------------------------------------------------------------------------------------------------

D = 12


def layer(**options):
    return randomize_weights(Attention(D, AttentionConfig(**{"heads": 3, **options})).double()).eval()


def torchs(ours):
    """torch.nn.MultiheadAttention with the same weights."""
    theirs = nn.MultiheadAttention(D, ours.config.heads, batch_first=True, dtype=torch.float64)
    parts = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.data = torch.cat([part.weight for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias for part in parts])
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    return theirs.eval()


def test_self_attention_is_torchs():
    ours, x = layer(), randn(B, T, D)
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = torchs(ours)(x, x, x, attn_mask=mask, need_weights=False)[0]
    assert_near(ours(x, AttentionContext(causal.resolve(arange_positions(T), arange_positions(T)))), expected)


def test_cross_attention_with_padding_is_torchs():
    ours, x, memory = layer(), randn(B, T, D), randn(B, S, D, seed=1)
    padding = torch.arange(S) >= torch.tensor([[5], [S]])
    expected = torchs(ours)(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]
    assert_near(
        ours(x, AttentionContext(everything.resolve(arange_positions(T), key_positions(~padding))), memory=memory),
        expected,
    )


def test_the_tap_sees_torchs_weights():
    ours, x, tap = layer(), randn(B, T, D), ActivationTap("weights")
    ours(x, AttentionContext(everything.resolve(arange_positions(T), arange_positions(T))), tap=tap)
    assert_near(tap.activations["weights"], torchs(ours)(x, x, x, average_attn_weights=False)[1])


@pytest.mark.parametrize("head_dim", [None, 5])
@pytest.mark.parametrize("value_dim", [None, 7])
@pytest.mark.parametrize("bias", ["qkvo", "qkv", "o", ""])
def test_sizes_and_biases_are_those_of_the_configuration(head_dim, value_dim, bias):
    ours = layer(heads=6 if head_dim else 3, kv_heads=3, head_dim=head_dim, value_dim=value_dim, bias=bias)
    K = head_dim or 4
    V, H = value_dim or K, ours.config.heads
    shapes = {name: tuple(weight.shape) for name, weight in ours.named_parameters()}
    sizes = {"query": (H * K, D), "key": (3 * K, D), "value": (3 * V, D), "output": (D, H * V)}
    assert {name.removesuffix(".weight"): shape for name, shape in shapes.items() if "weight" in name} == sizes
    assert {name[0] for name in shapes if "bias" in name} == set(bias)
    assert ours(randn(B, T, D), AttentionContext(causal.resolve(arange_positions(T), arange_positions(T)))).shape == (
        B,
        T,
        D,
    )


def project_heads(ours, x):
    """Queries, keys and values split into heads."""
    split = (
        (ours.query, ours.config.heads),
        (ours.key, ours.config.num_kv_heads),
        (ours.value, ours.config.num_kv_heads),
    )
    return [part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in split]


def test_clipped_projections_are_clamped():
    ours, x = layer(clip=0.2), randn(B, T, D)
    q, k, v = (t.clamp(-0.2, 0.2) for t in project_heads(ours, x))
    expected = ours.output(attend(q, k, v).transpose(1, 2).flatten(2))
    assert_near(ours(x, AttentionContext(everything.resolve(arange_positions(T), arange_positions(T)))), expected)


@pytest.mark.parametrize("over", ["head", "each_head", "width"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_queries_and_keys_are_normalized_before_they_are_rotated(over, kind, kv_heads):
    norm = NormConfig(kind=kind, affine="scale")
    ours = layer(qk_norm=norm, qk_norm_over=over, kv_heads=kv_heads, positions=Rotary())
    x, turned = randn(B, T, D), rotary_angles(Rotary(), 4, torch.arange(T)[None], torch.float64)
    plain = layer_norm if kind == "layer" else rms_norm

    def normed(projected, heads, weight):
        if over == "width":
            return plain(projected, weight, eps=norm.eps).unflatten(-1, (heads, -1)).transpose(1, 2)
        by_head = projected.unflatten(-1, (heads, -1))
        return (plain(by_head, eps=norm.eps) * weight).transpose(1, 2)

    q = apply_rotary(normed(ours.query(x), 3, ours.query_norm.weight), turned)
    k = apply_rotary(normed(ours.key(x), kv_heads, ours.key_norm.weight), turned)
    v = project_heads(ours, x)[2]
    expected = ours.output(attend(q, k, v).transpose(1, 2).flatten(2))
    context = AttentionContext(everything.resolve(arange_positions(T), arange_positions(T)), rotary_angles=turned)
    assert_near(ours(x, context), expected)


def test_dropout_acts_in_training_only():
    ours, x = layer(dropout=0.5), randn(B, T, D)
    context = AttentionContext(causal.resolve(arange_positions(T), arange_positions(T)))
    assert torch.equal(ours(x, context), ours(x, context))
    ours.train()
    assert not torch.equal(ours(x, context), ours(x, context))
    tap = ActivationTap("weights")
    assert not torch.equal(ours(x, context, tap=tap), ours(x, context, tap=tap))
