"""Linear layers with products in 8 bits: rounding, gradients, when they are used; on a CPU, by the plain formula."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import monoblock as mb
from monoblock.errors import ConfigError
from monoblock.kernels import fp8_linear as fp8
from monoblock.nn.linear import Linear
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


def test_rows_of_any_length_and_size_are_rounded_by_their_own_maximum():
    """Gradients are often far below 1."""
    torch.manual_seed(0)
    x = torch.randn(6, 3072) * torch.tensor([1e-20, 1e-9, 1e-3, 1.0, 1e3, 1e9])[:, None]
    x[torch.arange(6), torch.tensor([5, 1100, 2300, 3071, 1023, 1024])] *= 100  # the maximum is in another place each
    values, scales = fp8.quantize_rows(x)
    assert torch.equal(values.float().abs().amax(-1), torch.full((6,), 448.0))
    for row in range(6):
        assert relative_error(values[row].double() * scales[row], round_rows(x.double())[row]) < 1e-3


class RecordOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("columns", "step", "uses_kernel"),
    [(512, 1, False), (1040, 1, True), (16384, 1, True), (16400, 1, False), (3072, 2, False)],
)
def test_on_a_gpu_long_rows_are_rounded_by_the_kernel(columns, step, uses_kernel, monkeypatch):
    """The kernel is not run here: only its choice, and the shapes and dtypes that torch.compile is told."""
    monkeypatch.setattr(fp8, "is_available", lambda: True)
    with FakeTensorMode(), RecordOperators() as record:
        x = torch.empty_strided((8, columns), (step * columns, step), device="cuda", dtype=BF16)
        found, plain = fp8.quantize_rows(x), fp8.quantize_rows_plain(x)
    assert ("monoblock_python.quantize_rows.default" in record.names) == uses_kernel
    for one, other in zip(found, plain, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_a_matrix_with_one_scale_is_rounded_once():
    """Numbers of bfloat16 must not be rounded to bfloat16 again after they are scaled."""
    torch.manual_seed(0)
    x = torch.randn(64, 96).to(BF16)
    values, scales = fp8.quantize_matrix(x)
    expected = round_rows(x.double().reshape(1, -1)).reshape(64, 96)
    assert relative_error(values.double() * scales, expected) < 1e-3


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("quantize", [fp8.quantize_rows, fp8.quantize_matrix])
def test_the_kernel_computes_what_the_plain_formula_does(quantize, has_bias):
    torch.manual_seed(0)
    a, b = quantize(torch.randn(20, 64)), quantize(torch.randn(32, 64))
    bias = torch.randn(32) if has_bias else None
    found, expected = fp8.multiply_fused(a, b, bias), fp8.multiply_plain(a, b, bias)
    assert relative_error(found, expected.double()) < 4e-3  # both are rounded to bfloat16


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
    fp8.fp8_linear(x.detach(), weight, None).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_a_second_derivative_is_an_error_instead_of_a_wrong_number():
    x, weight, _ = make_layer()
    (gradient,) = torch.autograd.grad(fp8.fp8_linear(x, weight, None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_products_in_8_bits_are_for_training_under_autocast_to_bfloat16():
    x, weight, _ = make_layer()
    odd, frozen = torch.randn(50, 32).requires_grad_(), weight.detach()
    with torch.autocast("cpu", BF16):
        assert fp8.supports_fp8(x, weight)
        assert not fp8.supports_fp8(x, odd)  # 50 outputs
        assert not fp8.supports_fp8(x.detach(), frozen)
        assert not fp8.supports_fp8(x, weight.as_subclass(Subclass))
        with torch.no_grad():
            assert not fp8.supports_fp8(x, weight)
    with torch.autocast("cpu", torch.float16):
        assert not fp8.supports_fp8(x, weight)
    assert not fp8.supports_fp8(x, weight)


class Subclass(torch.Tensor):
    """Stands for a weight that is split among processes."""


RUNTIME = RuntimeConfig(torch.device("cpu"), BF16, compiled=False, deterministic=True, decisions=(), fp8=True)


def build(name, **changes):
    torch.manual_seed(0)
    model = mb.Transformer(mb.vary(mb.tiny(name), width=144, hidden=192, context=64, dropout=0.0, **changes))
    return model.train()


def use_fp8(model):
    for stack in (model.encoder, model.decoder):
        assert stack is None or stack.use_fp8_products()


def inputs_of(model, rows):
    ids = torch.randint(0, 30, (rows, 64), generator=torch.Generator().manual_seed(1))
    return {"source": ids} if model.encoder is None else {"source": ids, "target": ids}


def gradient_of(model, inputs):
    loss = CrossEntropyLoss()(model, inputs, inputs["source"])
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss, torch.cat([g.flatten() for g in gradients if g is not None])


BLOCK_PRODUCTS = {"gpt2": 6, "llama-7b": 7, "vaswani-base": 8, "mixtral-8x7b": 4}  # of a block; vaswani: on average


@pytest.mark.parametrize("rows", [8, 2])
@pytest.mark.parametrize("name", list(BLOCK_PRODUCTS))
def test_blocks_use_them_and_gradients_are_close_to_those_in_fp32(name, rows, monkeypatch):
    model = build(name)
    inputs, calls, original = inputs_of(model, rows), [], fp8.fp8_linear
    monkeypatch.setattr("monoblock.nn.linear.fp8_linear", lambda *args: calls.append(1) or original(*args))
    exact_loss, exact = gradient_of(model, inputs)
    names = list(model.state_dict())
    use_fp8(model)
    assert list(model.state_dict()) == names
    gradient_of(model, inputs)
    assert not calls, "without autocast"
    with RUNTIME.autocast():
        loss, found = gradient_of(model, inputs)
    assert len(calls) == BLOCK_PRODUCTS[name] * model.config.depth
    assert loss.item() == pytest.approx(exact_loss.item(), rel=2e-2)
    assert F.cosine_similarity(found, exact, dim=0) > 0.98


@pytest.mark.parametrize("norm_place", ["pre", "post", "sandwich"])
def test_hidden_states_between_blocks_are_in_16_bits(norm_place):
    model, seen = build("llama-7b", norm_place=norm_place), []
    use_fp8(model)
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with RUNTIME.autocast():
        model(**inputs_of(model, 2))
    assert len(seen) == model.config.depth
    assert set(seen) == {BF16}


@pytest.mark.parametrize("name", ["gpt2", "vaswani-base"])
def test_recomputed_activations_give_the_same_gradients(name):
    """The backward pass, which recomputes them, is outside of the `with` block."""
    model = build(name)
    use_fp8(model)
    inputs = inputs_of(model, 2)
    gradients = []
    for recompute in (False, True):
        for stack in (model.encoder, model.decoder):
            if stack is not None:
                stack.recompute = recompute
        with RUNTIME.autocast():
            loss = CrossEntropyLoss()(model, inputs, inputs["source"])
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_a_compiled_layer_multiplies_in_8_bits_under_autocast_only():
    x, weight, bias = make_layer()
    layer = Linear(32, 48)
    layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    compute = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        exact = compute(x)
        layer.uses_fp8 = True
        assert torch.equal(compute(x), fp8.fp8_linear(x, weight, bias))
        assert not torch.equal(compute(x), exact)
    assert torch.equal(compute(x), layer(x))


def test_a_model_trained_in_8_bits_is_optimized():
    model = build("llama-7b").eval()
    ids = torch.arange(10).view(2, 5)
    tokens = model.generate(ids, max_new_tokens=5)
    use_fp8(model)
    assert torch.equal(mb.optimize(model).generate(ids, max_new_tokens=5), tokens)


def test_a_device_without_8_bit_products_is_an_error():
    with pytest.raises(ConfigError, match=r"train\.precision=fp8 needs a GPU with 8-bit tensor cores"):
        choose_runtime("cpu", precision="fp8")


def test_the_runtime_of_fp8_is_bfloat16_with_products_in_8_bits(monkeypatch):
    monkeypatch.setattr("monoblock.training.runtime.has_fp8", lambda device: True)
    runtime = choose_runtime("cpu", precision="fp8")
    assert (runtime.autocast_dtype, runtime.fp8) == (BF16, True)
    assert not choose_runtime("cpu", precision="bf16").fp8


@pytest.mark.parametrize(("width", "is_error"), [(32, False), (36, True)])
def test_a_model_without_any_such_layer_is_an_error(width, is_error, monkeypatch, tmp_path):
    monkeypatch.setattr("monoblock.training.runtime.has_fp8", lambda device: True)
    text = tmp_path / "book.txt"
    text.write_text("the sons and the kings went up\n" * 90, encoding="utf-8")
    recipe = {
        "name": "small",
        "data": {"corpus": str(text)},
        "tokenizer": {"kind": "char", "vocab": 64},
        "model": {"family": "gpt", "width": width, "hidden": 4 * width + 4, "depth": 1, "heads": 2, "context": 16},
        "train": {"steps": 2, "batch": 3, "device": "cpu", "compile": "no", "precision": "fp8"},
    }
    with pytest.raises(ConfigError, match="changes no layer of this model") if is_error else nullcontext():
        mb.train(recipe, out=tmp_path / "run", progress=False)
    assert (tmp_path / "run").exists() != is_error
    torch.use_deterministic_algorithms(False)
