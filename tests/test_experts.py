"""Experts against a loop over tokens, and the balancing loss against the reference library's."""

import itertools

import pytest
import torch
from support import all_experts, close, stir
from torch.autograd import gradcheck
from torch.nn.functional import linear

from monoblock.config import ExpertsConfig, FeedForwardConfig
from monoblock.experts import Experts, load_balancing_loss, route
from monoblock.feedforward import ACTIVATIONS

B, T, D, F, E = 2, 3, 5, 7, 11
ROUTERS = ["softmax_renormalized", "softmax", "top_k_softmax"]


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(*, top_k=2, router="softmax", router_bias=False, **options):
    experts = ExpertsConfig(count=E, top_k=top_k, router=router, router_bias=router_bias)
    return stir(Experts(D, FeedForwardConfig(hidden=F, experts=experts, **options)).double())


def one_by_one(layer, x):
    """Each token: its best experts, run alone and weighed."""
    out = torch.zeros_like(x)
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        logits = linear(x[b, t], layer.router.weight, layer.router.bias)
        best = logits.argsort(descending=True)[: layer.experts.top_k].tolist()
        weights = {
            "softmax": logits.softmax(-1)[best],
            "softmax_renormalized": logits.softmax(-1)[best] / logits.softmax(-1)[best].sum(),
            "top_k_softmax": logits[best].softmax(-1),
        }[layer.experts.router]
        for expert, weight in zip(best, weights, strict=True):
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
def test_both_ways_are_the_loop_over_tokens(router, top_k, gated, bias):
    layer = build(router=router, top_k=top_k, gated=gated, bias=bias, router_bias=bias)
    x = draw(B, T, D)
    expected = one_by_one(layer, x)
    close(layer(x), expected)
    close(layer(x, tap=all_experts_of_a_part()), expected)


def all_experts_of_a_part():
    tap = all_experts()
    tap.endings = ("outputs",)
    return tap


@pytest.mark.parametrize("router", ROUTERS)
def test_weights_of_the_chosen_are_positive_and_sum_to_one_where_they_should(router):
    chosen, weights = route(draw(13, E), ExpertsConfig(count=E, top_k=3, router=router))
    assert chosen.shape == weights.shape == (13, 3)
    assert (weights > 0).all()
    sums = weights.sum(-1)
    if router == "softmax":
        assert (sums < 1).all()
    else:
        close(sums, torch.ones(13, dtype=torch.float64))


def test_two_routers_agree_when_every_expert_is_chosen():
    logits = draw(13, E)
    one, other = (
        route(logits, ExpertsConfig(count=E, top_k=E, router=router)) for router in ("softmax", "top_k_softmax")
    )
    close(one[1], other[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("router", ROUTERS)
def test_routing_at_the_edge_of_sixteen_bits_gives_no_nan(dtype, router):
    logits = (draw(13, E) * 6e4).clamp(-6e4, 6e4).to(dtype)
    weights = route(logits, ExpertsConfig(count=E, top_k=3, router=router))[1]
    assert weights.dtype == dtype
    assert weights.isfinite().all()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balancing_loss_is_the_reference_librarys(top_k):
    """Theirs counts each of a token's top_k choices as a whole token, ours as its part of one."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits, real = draw(B, 13, E).float(), torch.arange(13).expand(B, 13) < torch.tensor([[13], [7]])
    flat = logits.view(-1, E)
    close(load_balancing_loss(logits, top_k) * top_k, mixtral.load_balancing_loss_func((flat,), E, top_k))
    theirs = mixtral.load_balancing_loss_func((flat,), E, top_k, real)
    close(load_balancing_loss(logits, top_k, real) * top_k, theirs)


def test_the_balancing_loss_is_one_when_even_and_the_count_when_all_go_to_one():
    even = torch.eye(E) * 30
    close(load_balancing_loss(even, 1), torch.tensor(1.0))
    close(load_balancing_loss(even[:1].expand(13, E), 1), torch.tensor(float(E)))


def test_an_unused_expert_still_learns_nothing_in_training():
    layer = build(top_k=1).train()
    layer(draw(1, 1, D)).sum().backward()
    used = layer.up.grad.flatten(1).any(1)
    assert used.sum() == 1
    assert layer.up.grad.isfinite().all()


@pytest.mark.parametrize("tap", [None, all_experts_of_a_part()], ids=["gathered", "plain"])
def test_gradients_are_those_of_finite_differences(tap):
    layer = build(top_k=2, gated=True, activation="silu", router="softmax_renormalized")
    assert gradcheck(lambda x: layer(x, tap=tap), (draw(B, T, D).requires_grad_(),))
