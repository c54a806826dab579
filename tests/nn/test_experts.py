"""Experts against a loop over tokens, and the load-balancing loss against that of transformers."""

import itertools

import pytest
import torch
from support import all_experts_tap, assert_near, randomize_weights
from torch.autograd import gradcheck
from torch.nn.functional import linear

import monoblock as mb
from monoblock.config.model import ExpertsConfig, FeedForwardConfig
from monoblock.nn.experts import Experts, load_balancing_loss, route
from monoblock.nn.feedforward import ACTIVATIONS

B, T, D, F, E = 2, 3, 5, 7, 11
ROUTERS = ["softmax_renormalized", "softmax", "top_k_softmax"]


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(*, top_k=2, router="softmax", router_bias=False, **options):
    experts = ExpertsConfig(count=E, top_k=top_k, router=router, router_bias=router_bias)
    return randomize_weights(Experts(D, FeedForwardConfig(hidden=F, experts=experts, **options)).double())


def run_token_by_token(layer, x):
    """The weighted sum of the selected experts, one token at a time."""
    out = torch.zeros_like(x)
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        logits = linear(x[b, t], layer.router.weight, layer.router.bias)
        expert_ids = logits.argsort(descending=True)[: layer.experts_config.top_k].tolist()
        weights = {
            "softmax": logits.softmax(-1)[expert_ids],
            "softmax_renormalized": logits.softmax(-1)[expert_ids] / logits.softmax(-1)[expert_ids].sum(),
            "top_k_softmax": logits[expert_ids].softmax(-1),
        }[layer.experts_config.router]
        for expert, weight in zip(expert_ids, weights, strict=True):
            out[b, t] += weight * _expert(layer, expert, x[b, t])
    return out


def _expert(layer, e, x):
    biases = (layer.up_bias, layer.gate_bias, layer.down_bias)
    up_bias, gate_bias, down_bias = (None if bias is None else bias[e] for bias in biases)
    hidden, activate = linear(x, layer.up[e], up_bias), ACTIVATIONS[layer.config.activation]
    hidden = activate(hidden) if layer.gate is None else activate(linear(x, layer.gate[e], gate_bias)) * hidden
    return linear(hidden, layer.down[e], down_bias)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_both_paths_equal_the_loop_over_tokens(router, top_k, gated, bias):
    layer = build(router=router, top_k=top_k, gated=gated, bias=bias, router_bias=bias)
    x = randn(B, T, D)
    expected = run_token_by_token(layer, x)
    assert_near(layer(x), expected)
    assert_near(layer(x, tap=layer_tap()), expected)


def layer_tap():
    tap = all_experts_tap()
    tap.endings = ("outputs",)
    return tap


@pytest.mark.parametrize("router", ROUTERS)
def test_routing_weights_are_positive_and_sum_to_one_if_renormalized(router):
    expert_ids, weights = route(randn(13, E), ExpertsConfig(count=E, top_k=3, router=router))
    assert expert_ids.shape == weights.shape == (13, 3)
    assert (weights > 0).all()
    sums = weights.sum(-1)
    if router == "softmax":
        assert (sums < 1).all()
    else:
        assert_near(sums, torch.ones(13, dtype=torch.float64))


def test_two_routers_agree_if_every_expert_is_selected():
    logits = randn(13, E)
    first, second = (
        route(logits, ExpertsConfig(count=E, top_k=E, router=router)) for router in ("softmax", "top_k_softmax")
    )
    assert_near(first[1], second[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("router", ROUTERS)
def test_large_sixteen_bit_logits_give_no_nan(dtype, router):
    logits = (randn(13, E) * 6e4).clamp(-6e4, 6e4).to(dtype)
    weights = route(logits, ExpertsConfig(count=E, top_k=3, router=router))[1]
    assert weights.dtype == dtype
    assert weights.isfinite().all()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balancing_loss_is_that_of_transformers(top_k):
    """transformers counts each of the top_k choices of a token as one token, this package as 1 / top_k."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits, valid = randn(B, 13, E).float(), torch.arange(13).expand(B, 13) < torch.tensor([[13], [7]])
    flat = logits.view(-1, E)
    assert_near(load_balancing_loss(logits, top_k) * top_k, mixtral.load_balancing_loss_func((flat,), E, top_k))
    theirs = mixtral.load_balancing_loss_func((flat,), E, top_k, valid)
    assert_near(load_balancing_loss(logits, top_k, valid) * top_k, theirs)


def test_the_balancing_loss_is_one_if_balanced_and_the_count_if_all_tokens_go_to_one_expert():
    even = torch.eye(E) * 30
    assert_near(load_balancing_loss(even, 1), torch.tensor(1.0))
    assert_near(load_balancing_loss(even[:1].expand(13, E), 1), torch.tensor(float(E)))


def test_an_unused_expert_has_no_gradient():
    layer = build(top_k=1).train()
    layer(randn(1, 1, D)).sum().backward()
    used = layer.up.grad.flatten(1).any(1)
    assert used.sum() == 1
    assert layer.up.grad.isfinite().all()


@pytest.mark.parametrize("tap", [None, layer_tap()], ids=["gathered", "plain"])
def test_gradients_are_those_of_finite_differences(tap):
    layer = build(top_k=2, gated=True, activation="silu", router="softmax_renormalized")
    assert gradcheck(lambda x: layer(x, tap=tap), (randn(B, T, D).requires_grad_(),))


@pytest.mark.parametrize("tap", [None, lambda name, tensor: tensor])
def test_under_autocast_the_output_has_the_dtype_of_the_input_and_is_close(tap):
    torch.manual_seed(0)
    layer = mb.Transformer(mb.tiny("mixtral-8x7b")).decoder.blocks[0].feedforward
    x = torch.randn(2, 9, layer.up.shape[-1])
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, tap)
    assert found.dtype == torch.float32
    is_close = (found - exact).norm(dim=-1) < 0.02 * exact.norm(dim=-1)
    assert is_close.float().mean() > 0.8  # a near tie of the router may select another expert
