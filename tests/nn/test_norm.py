"""The norms against their formulas in fp64, against torch's modules, and with large 16-bit inputs."""

import pytest
import torch
from support import assert_near
from torch import nn
from torch.autograd import gradcheck

from monoblock.config.families import gpt
from monoblock.config.model import NormConfig
from monoblock.model import Transformer
from monoblock.nn.norm import Norm, layer_norm, rms_norm

HALF = [torch.float16, torch.bfloat16]
CONFIGS = [
    NormConfig(kind=kind, affine=affine, unit_offset=unit, cast=cast)
    for kind, affines in (("layer", ("scale_shift", "scale", "none")), ("rms", ("scale", "none")))
    for affine in affines
    for unit in (False, True)
    for cast in ("before_scale", "after_scale")
]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def config_id(config):
    return f"{config.kind}-{config.affine}-{config.unit_offset}-{config.cast}"


def test_layer_norm_is_its_formula():
    x, weight, bias = randn(2, 3, 7), randn(7, seed=1), randn(7, seed=2)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    assert_near(layer_norm(x, weight, bias, 1e-3), (x - mean) / (variance + 1e-3) ** 0.5 * weight + bias)


def test_rms_norm_is_its_formula():
    x, weight = randn(2, 3, 7), randn(7, seed=1)
    assert_near(rms_norm(x, weight, 1e-3), x / (x.pow(2).mean(-1, keepdim=True) + 1e-3) ** 0.5 * weight)


def test_norms_are_torchs():
    x = randn(2, 3, 7, dtype=torch.float32)
    assert_near(Norm(7, NormConfig(eps=1e-4))(x), nn.LayerNorm(7, eps=1e-4)(x))
    assert_near(Norm(7, NormConfig(kind="rms", affine="scale", eps=1e-4))(x), nn.RMSNorm(7, eps=1e-4)(x))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_norm_has_the_weights_its_configuration_names(config):
    norm = Norm(7, config)
    assert (norm.weight is None) == (config.affine == "none")
    assert (norm.bias is None) == (config.affine != "scale_shift")


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_new_norm_only_normalizes(config):
    x = randn(2, 3, 7)
    plain = layer_norm(x, eps=config.eps) if config.kind == "layer" else rms_norm(x, eps=config.eps)
    assert_near(Norm(7, config).double()(x), plain)


def test_a_unit_offset_scales_by_one_plus_the_weight():
    x, weight = randn(2, 3, 7), randn(7, seed=1)
    for kind, affine in (("layer", "scale"), ("rms", "scale")):
        offset = Norm(7, NormConfig(kind=kind, affine=affine, unit_offset=True)).double()
        straight = Norm(7, NormConfig(kind=kind, affine=affine)).double()
        offset.weight.data, straight.weight.data = weight, 1 + weight
        assert_near(offset(x), straight(x))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_weight_for_each_head_scales_each_head(kind):
    x, weight = randn(2, 3, 5, 7), randn(5, 7, seed=1)
    norm = Norm((5, 7), NormConfig(kind=kind, affine="scale")).double()
    norm.weight.data = weight
    plain = layer_norm(x, eps=1e-5) if kind == "layer" else rms_norm(x, eps=1e-5)
    assert_near(norm(x), torch.stack([plain[:, :, head] * weight[head] for head in range(5)], dim=2))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", [7, (5, 7)], ids=str)
def test_sixteen_bit_inputs_keep_their_dtype(config, dtype, shape):
    x = randn(2, 3, 5, 7, dtype=dtype)
    assert Norm(shape, config).to(dtype)(x).dtype == dtype


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", [7, (5, 7)], ids=str)
def test_sixteen_bits_up_to_the_edge_are_normed_like_fp64(config, dtype, shape):
    x = randn(2, 3, 5, 7)
    x = (x * 6e4 / x.abs().max()).to(dtype)
    expected = Norm(shape, config).double()(x.double())
    torch.testing.assert_close(Norm(shape, config).to(dtype)(x).double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_sixteen_bit_inputs_can_meet_weights_in_fp32(config):
    """As under autocast: a layer before may have returned 16 bits."""
    torch.manual_seed(0)
    norm = Norm(8, config)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 8).bfloat16()
    found, expected = norm(x), norm.double()(x.double())
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() < 0.01 * expected.norm()


def test_a_scale_in_fp32_is_rounded_once_when_the_cast_comes_after():
    """Gemma's order and Llama's differ in bf16: normed, scaled, rounded against normed, rounded, scaled."""
    x, weight = randn(211, 37, dtype=torch.bfloat16), randn(37, seed=1, dtype=torch.bfloat16)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, cast_after_scale=True), (exact * weight.float()).bfloat16())
    assert torch.equal(rms_norm(x, weight), exact.bfloat16() * weight)


def test_one_vector_is_normed_whatever_its_neighbours():
    x = randn(3, 5, 7)
    assert_near(layer_norm(x)[1, 2], layer_norm(x[1, 2]))
    assert_near(rms_norm(x)[1, 2], rms_norm(x[1, 2]))


def test_gradients_are_those_of_finite_differences():
    x, weight, bias = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 3, 7), (7,), (7,)]))
    assert gradcheck(layer_norm, (x, weight, bias))
    assert gradcheck(rms_norm, (x, weight))


def test_a_vector_of_zeros_gives_zeros_and_finite_gradients():
    x = torch.zeros(2, 7, requires_grad=True)
    out = layer_norm(x) + rms_norm(x)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


# -- batch norm, and none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_is_torchs_over_rows_and_positions(dtype):
    norm, reference = Norm(7, NormConfig(kind="batch")).to(dtype), nn.BatchNorm1d(7).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(randn(7, seed=1))
        norm.bias.copy_(randn(7, seed=2))
        reference.weight.copy_(norm.weight)
        reference.bias.copy_(norm.bias)
    for seed in (3, 4):
        x = randn(2, 5, 7, seed=seed, dtype=dtype)
        mean, variance = x.mean((0, 1)), x.var((0, 1), unbiased=False)
        assert_near(norm(x), (x - mean) / (variance + 1e-5) ** 0.5 * norm.weight + norm.bias)
        reference(x.mT)
    assert_near(norm.running_mean, reference.running_mean)
    assert_near(norm.running_var, reference.running_var)
    assert_near(norm.eval()(x), reference.eval()(x.mT).mT)


def test_batch_norm_has_the_right_gradient():
    norm = Norm(3, NormConfig(kind="batch")).double()
    assert gradcheck(norm, randn(2, 4, 3).requires_grad_())


def test_padding_changes_the_statistics_of_batch_norm_in_training_and_not_in_evaluation():
    """Rows of 10, 50 and 100 tokens: 140 of 300 positions are padding, and the statistics include them."""
    x, valid = randn(3, 100, 7) + 2, torch.arange(100) < torch.tensor([10, 50, 100])[:, None]
    padded = torch.where(valid[..., None], x, 0)
    batch, layer = (Norm(7, NormConfig(kind=kind)).double() for kind in ("batch", "layer"))
    alone = batch(x[valid])
    assert (batch(padded)[valid] - alone).abs().max() > 0.5
    assert_near(batch.eval()(padded)[valid], batch(x[valid]))
    assert_near(layer(padded)[valid], layer(x[valid]))


def test_a_row_depends_on_its_batch_in_training_only():
    norm, x = Norm(7, NormConfig(kind="batch")).double(), randn(3, 5, 7)
    assert (norm(x)[:1] - norm(x[:1])).abs().max() > 0.1
    norm.eval()
    assert_near(norm(x)[:1], norm(x[:1]))


def test_recomputed_blocks_count_a_batch_once():
    torch.manual_seed(0)
    model = Transformer(gpt(vocab=11, width=12, depth=2, heads=3, context=13, norm="batch")).train()
    ids, states = torch.randint(11, (2, 13)), []
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for recompute in (False, True):
        model.load_state_dict(start)
        model.recompute(recompute)(ids).sum().backward()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name})
    assert states[0]
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in states[0].items())


def test_no_norm_returns_its_input():
    norm, x = Norm(7, NormConfig(kind="none", affine="none")), randn(2, 7)
    assert norm(x) is x
    assert not list(norm.parameters())
