"""Linear layers with products in 8 bits: rounding, gradients, when they are used; on a CPU, by the plain formula."""

import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.errors import ConfigError
from monoblock.kernels import fp8_linear as fp8
from monoblock.nn.linear import linear
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.runtime import RuntimeConfig, choose_runtime

BF16 = torch.bfloat16


def round_rows(x):
    """Round a matrix of fp64 as e4m3 does: 4 significant bits, and multiples of 2^-9 below 2^-6; 448 is the largest."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scaled = x / scale
    exponent = torch.floor(torch.log2(scaled.abs())).clamp(min=-6)
    step = torch.exp2(exponent - 3)
    return torch.round(scaled / step) * step * scale


def relative_error(found, expected):
    return float((found.detach().double() - expected).norm() / expected.norm())


def make_layer(rows=40, inputs=32, outputs=48):
    torch.manual_seed(0)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]  # rows of very different size
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    return [t.to(BF16).float().requires_grad_() for t in (x, weight, bias)]


def test_rounded_rows_are_those_of_the_definition_of_e4m3():
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * torch.exp(3 * torch.randn(64, 256))).to(BF16)
    values, scales = fp8.quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert relative_error(values.double() * scales, round_rows(x.double())) < 1e-3  # ties are rounded apart


@pytest.mark.parametrize("quantize", [fp8.quantize_rows, fp8.quantize_matrix])
def test_the_largest_number_is_exact_and_zeros_stay(quantize):
    x = torch.tensor([[3.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    values, scales = quantize(x)
    found = values.float() * scales
    assert found[0, 0] == 3.0
    assert torch.equal(found[1], torch.zeros(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden(bad):
    """The guard of the trainer must see it."""
    x, weight, _ = make_layer()
    x = x.detach().clone()
    x[3, 5] = bad
    out = fp8.fp8_linear(x, weight, None)
    assert not out[3].isfinite().any()
    assert out[2].isfinite().all()


def test_output_and_gradients_are_those_of_rounded_factors():
    """fp64 arithmetic with the factors rounded as e4m3; the gradient of the weight is that of factors in bfloat16."""
    x, weight, bias = make_layer()
    grad = torch.randn(40, 48).to(BF16)
    out = fp8.fp8_linear(x, weight, bias)
    assert out.dtype == BF16
    found = torch.autograd.grad(out, (x, weight, bias), grad)
    exact_x, exact_weight, exact_grad = (t.detach().double() for t in (x, weight, grad))
    expected_out = round_rows(exact_x) @ round_rows(exact_weight).T + bias.detach().double()
    expected = (
        round_rows(exact_grad) @ round_rows(exact_weight.T.contiguous()).T,
        exact_grad.T @ exact_x,
        exact_grad.sum(0),
    )
    assert relative_error(out, expected_out) < 5e-3
    for gradient, reference, leaf in zip(found, expected, (x, weight, bias), strict=True):
        assert gradient.dtype == leaf.dtype
        assert relative_error(gradient, reference) < 5e-3


def test_rounding_errs_by_at_most_a_sixteenth_of_each_factor():
    x, weight, bias = make_layer()
    exact = F.linear(*(t.detach().double() for t in (x, weight, bias)))
    bound = (1 / 8 + 1 / 256) * F.linear(x.detach().double().abs(), weight.detach().double().abs())
    assert ((fp8.fp8_linear(x, weight, bias).double() - exact).abs() <= bound + 0.01 * exact.abs()).all()


def test_a_frozen_layer_or_input_has_no_gradient():
    x, weight, bias = make_layer()
    frozen = fp8.fp8_linear(x, weight.detach(), bias.detach())
    (gradient,) = torch.autograd.grad(frozen.sum(), x)
    assert gradient.isfinite().all()
    assert fp8.fp8_linear(x.detach(), weight, None).sum().backward() is None
    assert x.grad is None
    assert weight.grad is not None


def test_products_in_8_bits_are_for_training_under_autocast_to_bfloat16():
    x, weight, _ = make_layer()
    odd = torch.randn(50, 32).requires_grad_()
    with torch.autocast("cpu", BF16):
        assert not fp8.supports_fp8(x, weight)
        with fp8.fp8_products():
            assert fp8.supports_fp8(x, weight)
            assert not fp8.supports_fp8(x, odd)  # 50 outputs
            with torch.no_grad():
                assert not fp8.supports_fp8(x, weight)
        assert not fp8.supports_fp8(x, weight)
    with fp8.fp8_products():
        assert not fp8.supports_fp8(x, weight)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "vaswani-base", "mixtral-8x7b"])
def test_a_model_uses_them_in_its_blocks_and_learns_as_with_16_bits(name, monkeypatch):
    """Between two draws of rounding, gradients of a tiny model stay close to those in fp32."""
    torch.manual_seed(0)
    model = mb.Transformer(mb.vary(mb.tiny(name), width=144, context=64, dropout=0.0))
    ids = torch.randint(0, 30, (8, 64))
    inputs = {"source": ids} if model.encoder is None else {"source": ids, "target": ids}
    layers, original = [], fp8.fp8_linear
    monkeypatch.setattr("monoblock.nn.linear.fp8_linear", lambda *args: layers.append(1) or original(*args))
    plain = CrossEntropyLoss()(model, inputs, ids)
    expected = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
    runtime = RuntimeConfig(torch.device("cpu"), BF16, compiled=False, deterministic=True, decisions=(), fp8=True)
    with runtime.autocast():
        loss = CrossEntropyLoss()(model, inputs, ids)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert len(layers) >= 2 * model.config.depth
    assert loss.item() == pytest.approx(plain.item(), rel=2e-2)
    one, other = (torch.cat([g.flatten() for g in grads if g is not None]) for grads in (found, expected))
    assert F.cosine_similarity(one, other, dim=0) > 0.98


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_a_compiled_model_follows_the_with_block():
    """torch.compile must not keep the choice of the first call."""
    x, weight, bias = make_layer()
    with torch.autocast("cpu", BF16):
        compute = torch.compile(linear, backend="eager", fullgraph=True)
        plain = compute(x, weight, bias)
        with fp8.fp8_products():
            assert not torch.equal(compute(x, weight, bias), plain)
        assert torch.equal(compute(x, weight, bias), plain)


def test_a_device_without_8_bit_products_is_an_error():
    with pytest.raises(ConfigError, match="precision=fp8 needs a GPU with 8-bit tensor cores"):
        choose_runtime("cpu", precision="fp8")
